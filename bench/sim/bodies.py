"""This file is what clients of a simulated world send: the same ask, as a call or in a dialect.

It does not know what comes back. Each function is one of its ask alone; to what a chat that calls
tools is held, the gateway's own reader of bodies says.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from actors.gateway.call import Call, Prompt
from actors.gateway.pattern import read_pattern
from actors.gateway.shape import Parsers, read_shape
from bench.sim.scenario import CALLED, CHOICE_WAYS, TOOLS, Ask
from bench.sim.vectors import LABEL_IDS
from messages.openai import ChatBody
from messages.types import Grammar, Sampling, StopRules, pack

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
GENERATE = "/generate"
RESPONSES = "/v1/responses"


def sampling_of(ask: Ask) -> Sampling:
    return Sampling(
        seed=ask.seed,
        ignore_eos=ask.ignore_eos,
        max_tokens=ask.max_tokens,
        stop_ids=ask.stop_ids,
        logprobs=0 if ask.logprobs else None,
        frequency_penalty=0.5 if ask.penalised else 0.0,
        want_vector=ask.wants == "vector",
        label_ids=LABEL_IDS if ask.wants == "scores" else (),
    )


def call_of(ask: Ask) -> Call:
    """As the Engine asks."""
    return Call(
        prompts=(Prompt(text=ask.text) if ask.text else Prompt(ids=pack(ask.prompt)),),
        choice_count=ask.choice_count,
        sampling=sampling_of(ask),
        stop=StopRules(
            strings=(ask.stop,) if ask.stop else (),
            patterns=(read_pattern(ask.stop_pattern),) if ask.stop_pattern else (),
        ),
        namespace=ask.namespace,
        grammar=Grammar(*ask.grammar) if ask.grammar else None,
    )


def tool_fields(tools: str) -> dict[str, Any]:
    """Of a body, by `Ask.tools`."""
    one = {"type": "function", "function": {"name": CALLED}}
    chosen: Any = "auto" if tools in CHOICE_WAYS else "required"
    if tools == "named":
        chosen = one
    elif tools == "allowed":
        chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}}
    given = list(TOOLS)
    if tools in CHOICE_WAYS and tools != "loose":
        given = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    is_parallel = not tools.endswith("single")
    return {"tools": given, "tool_choice": chosen, "parallel_tool_calls": is_parallel}


@functools.cache
def grammar_of(tools: str, form: str = "") -> tuple[str, ...]:
    """What an answer is held to, as `Ask.grammar`; `form`: how its model writes calls."""
    message = {"role": "user", "content": ""}
    body = {"model": "tiny", "messages": [message], **tool_fields(tools)}
    chat = msgspec.json.decode(msgspec.json.encode(body), type=ChatBody)
    grammar = read_shape(chat, Parsers(tool=form), None, len(TOOLS)).grammar
    if grammar is None:
        assert tools in CHOICE_WAYS, f"{tools} holds an answer to nothing"
        return ()
    return grammar.kind, grammar.text


def path_of(ask: Ask) -> str:
    """Where `body_of` belongs."""
    return CHATS if ask.tools else COMPLETIONS


def body_of(ask: Ask) -> bytes:
    """A completion, or a chat where tools are to be called, or may be."""
    is_whole = ask.reader in ("http whole", "http line")
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "n": ask.choice_count,
        "ignore_eos": ask.ignore_eos,
        "stream": not is_whole,
    }
    if ask.tools:
        body["messages"] = [{"role": "user", "content": ask.text}]
        body |= tool_fields(ask.tools)
    else:
        body["prompt"] = ask.text or list(ask.prompt)
    if not is_whole:
        body["stream_options"] = {"include_usage": True}
    if ask.stop:
        body["stop"] = [ask.stop]
    if ask.stop_pattern:
        body["stop_regex"] = ask.stop_pattern
    if ask.logprobs:
        body["logprobs"] = True if ask.tools else 0
    if ask.stop_ids:
        body["stop_token_ids"] = list(ask.stop_ids)
    if ask.penalised:
        body["frequency_penalty"] = 0.5
    if ask.grammar and not ask.tools:  # else it is made of them
        kind, text = ask.grammar
        is_text = kind in ("regex", "ebnf")
        names = {"choice": "guided_choice", "json_schema": "guided_json"}
        body[names.get(kind, kind)] = text if is_text else msgspec.Raw(text.encode())
    return msgspec.json.encode(body)


def native_body(ask: Ask) -> bytes:
    """For /generate: one choice, not streamed."""
    assert ask.choice_count == 1
    params: dict[str, Any] = {
        "max_new_tokens": ask.max_tokens,
        "sampling_seed": ask.seed,
        "ignore_eos": ask.ignore_eos,
    }
    if ask.stop:
        params["stop"] = [ask.stop]
    if ask.stop_pattern:
        params["stop_regex"] = ask.stop_pattern
    if ask.stop_ids:
        params["stop_token_ids"] = list(ask.stop_ids)
    if ask.penalised:
        params["frequency_penalty"] = 0.5
    if ask.grammar:
        kind, text = ask.grammar
        params[kind] = text if kind in ("regex", "ebnf") else msgspec.Raw(text.encode())
    prompt = {"text": ask.text} if ask.text else {"input_ids": list(ask.prompt)}
    return msgspec.json.encode(
        {**prompt, "sampling_params": params, "return_logprob": ask.logprobs}
    )


def embedding_body(ask: Ask) -> bytes:
    return msgspec.json.encode({"model": "tiny", "input": list(ask.prompt)})


def background_body(ask: Ask) -> bytes:
    """For a response that is made in the background, and streamed."""
    body: dict[str, Any] = {
        "model": "tiny",
        "input": ask.text,
        "max_output_tokens": ask.max_tokens,
        "seed": ask.seed,
        "ignore_eos": ask.ignore_eos,
        "background": True,
        "stream": True,
    }
    if ask.stop:
        body["stop"] = [ask.stop]
    if ask.penalised:
        body["frequency_penalty"] = 0.5
    if ask.grammar:
        schema = msgspec.json.decode(ask.grammar[1])
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    return msgspec.json.encode(body)
