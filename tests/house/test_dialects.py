"""A real server, and the official clients of the other dialects.

The tiny model says nonsense, so that answers are compared with each other: what is streamed with
what is not, one dialect with another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import pytest

from tests.house.server import WAIT_S, Server, eventually

ADMIN = {"authorization": "Bearer admin-key"}
TOOL = {
    "name": "f",
    "description": "x",
    "input_schema": {
        "type": "object",
        "properties": {"where": {"enum": ["here", "there"]}},
        "required": ["where"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}
HELLO: Any = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "admin"
    keys.write_text("admin-key\n", "utf-8")
    keys.chmod(0o600)
    words = ("--placement", "threads", "--admin-key-file", str(keys))
    found = Server(tiny, tmp_path_factory.mktemp("logs"), *words)
    try:
        yield found.wait_ready()
    finally:
        found.close()


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


@pytest.fixture
def llama(server: Server) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url, timeout=WAIT_S)
    yield client
    client.close()


def post(server: Server, path: str, body: Any = None, **keywords: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=WAIT_S, **keywords)


# Anthropic


def test_a_message_is_streamed_as_it_is_answered(
    server: Server, claude: anthropic.Anthropic
) -> None:
    asked: Any = {
        "model": server.model(),
        "max_tokens": 16,
        "messages": HELLO,
        "extra_body": GREEDY,
    }
    plain = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    (block,) = plain.content
    assert block.type == "text" and block.text == text
    assert final.content[0].text == text
    assert final.stop_reason == plain.stop_reason == "max_tokens"
    assert plain.usage.output_tokens == final.usage.output_tokens == 16
    for usage in (plain.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 5
    assert plain._request_id


def test_a_stream_of_messages_begins_with_the_prompt_counted(
    server: Server, claude: anthropic.Anthropic
) -> None:
    counted = claude.messages.count_tokens(model=server.model(), messages=HELLO, system="Be short.")
    asked: Any = {"model": server.model(), "messages": HELLO, "system": "Be short."}
    # Greedy: what is drawn may be the end at once, and then there is no block.
    stream = claude.messages.create(**asked, max_tokens=3, stream=True, extra_body=GREEDY)
    first = next(iter(stream))
    assert first.type == "message_start"
    usage = first.message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    kinds = [event.type for event in stream]
    assert kinds[0] == "content_block_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "f"}, {"type": "any"}], ids=["named", "any"]
)
def test_a_forced_tool_is_used(server: Server, claude: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {
        "model": server.model(),
        "max_tokens": 88,
        "extra_body": GREEDY,
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    plain = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for message in (plain, final):
        (block,) = message.content
        assert block.type == "tool_use" and block.name == "f"
        assert message.stop_reason == plain.stop_reason
        # A model that says nonsense may fill its limit with blanks, where JSON has them.
        if message.stop_reason == "tool_use":
            assert block.input["where"] in ("here", "there")
        else:
            assert choice["type"] == "any" and message.stop_reason == "max_tokens"
    # And the conversation goes on with its result.
    result = {"type": "tool_result", "tool_use_id": plain.content[0].id, "content": "42"}
    asked["messages"] = [
        *HELLO,
        {"role": "assistant", "content": plain.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    asked["tool_choice"] = {"type": "none"}
    asked["max_tokens"] = 4
    assert claude.messages.create(**asked).content[0].type == "text"


def test_the_beginning_of_an_answer_is_continued(
    server: Server, claude: anthropic.Anthropic
) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    shorter = claude.messages.count_tokens(model=server.model(), messages=begun).input_tokens
    longer = claude.messages.count_tokens(
        model=server.model(), messages=[*begun, {"role": "user", "content": ""}]
    ).input_tokens
    assert shorter < longer, "the last message is left open"


def test_errors_are_those_that_the_client_knows(
    server: Server, claude: anthropic.Anthropic
) -> None:
    model = server.model()
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="nonsense", max_tokens=1, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        claude.messages.create(
            model=model, max_tokens=1, messages=HELLO, extra_body={"temperature": 7}
        )
    assert "temperature" in wrong.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=model, max_tokens=9999, messages=HELLO, stream=True)


# Ollama


def test_an_ollama_chat_streams_what_it_answers(server: Server, llama: ollama.Client) -> None:
    asked: Any = {
        "model": server.model(),
        "messages": HELLO,
        "options": {"num_predict": 12, "temperature": 0},
    }
    plain = llama.chat(**asked)
    parts = list(llama.chat(**asked, stream=True))
    assert plain.message.content == "".join(part.message.content or "" for part in parts)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert plain.done_reason == parts[-1].done_reason == "length"
    assert plain.eval_count == parts[-1].eval_count == 12
    assert plain.prompt_eval_count and plain.total_duration and plain.eval_duration is not None


def test_ollama_generates_with_and_without_the_template(
    server: Server, llama: ollama.Client
) -> None:
    options = {"num_predict": 8, "temperature": 0, "seed": 1}
    model = server.model()
    chat = llama.chat(model=model, messages=HELLO, options=options)
    templated = llama.generate(model=model, prompt=HELLO[0]["content"], options=options)
    assert templated.response == chat.message.content
    raw = llama.generate(model=model, prompt="The house", raw=True, options=options)
    ours = server.client().completions.create(
        model=model, prompt="The house", max_tokens=8, temperature=0
    )
    assert raw.response == ours.choices[0].text
    parts = llama.generate(
        model=model, prompt="The house", raw=True, options=options, stream=True, logprobs=True
    )
    collected = list(parts)
    assert "".join(part.response for part in collected) == raw.response
    assert sum(len(part.logprobs or ()) for part in collected) == 8


def test_ollama_keeps_to_a_format(server: Server, llama: ollama.Client) -> None:
    found = llama.chat(
        model=server.model(),
        messages=HELLO,
        format=TOOL["input_schema"],
        options={"num_predict": 60},
    )
    assert found.message.content is not None and '"where"' in found.message.content


def test_ollama_lists_and_shows_the_model(server: Server, llama: ollama.Client) -> None:
    model = server.model()
    (card,) = llama.list().models
    assert card.model == model and card.size and card.digest
    assert llama.ps().models[0].model == model
    shown = llama.show(model)
    assert "completion" in (shown.capabilities or ())
    assert shown.modelinfo is not None and shown.modelinfo["model.context_length"] == 512
    assert llama.generate(model=model).done_reason == "load"


def test_ollama_errors_are_those_that_the_client_knows(
    server: Server, llama: ollama.Client
) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        llama.chat(model="nonsense", messages=HELLO)
    assert missing.value.status_code == 404 and "nonsense" in missing.value.error
    with pytest.raises(ollama.ResponseError) as wrong:
        list(llama.chat(model=server.model(), messages=HELLO, options={"top_p": 7}, stream=True))
    assert wrong.value.status_code == 400 and "top_p" in wrong.value.error


# SGLang's own, and ours


def test_the_native_route_says_what_the_completion_says(server: Server) -> None:
    params = {"max_new_tokens": 9, "temperature": 0}
    body = {
        "text": ["The house", "x"],
        "sampling_params": [params, {**params, "max_new_tokens": 3}],
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    first, second = post(server, "/generate", body).json()
    assert len(first["output_ids"]) == 9 and len(second["output_ids"]) == 3
    ours = server.client().completions.create(
        model=server.model(), prompt="The house", max_tokens=9, temperature=0
    )
    assert first["text"] == ours.choices[0].text
    meta = first["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == first["output_ids"]
    assert all(len(best) == 2 for best in meta["output_top_logprobs"])
    with httpx.stream(
        "POST", server.url + "/generate", json={**body, "stream": True}, timeout=WAIT_S
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    last = {}
    for event in map(json.loads, lines[:-1]):
        last[event["index"]] = event
    assert last[0]["text"] == first["text"] and last[1]["output_ids"] == second["output_ids"]


def test_the_native_route_tells_of_the_prompt(server: Server) -> None:
    body = {
        "text": "The house has rooms",
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    ids = post(server, "/tokenize", {"prompt": body["text"]}).json()["tokens"]
    found = post(server, "/generate", body).json()
    told = found["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in told] == ids[1:]
    assert all(logprob < 0 for logprob, _, _ in told)
    assert found["output_ids"] == []


def test_tokens_go_there_and_back(server: Server) -> None:
    text = "The house has many rooms éà 🙂"
    found = post(server, "/tokenize", {"prompt": text}).json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
    assert post(server, "/v1/detokenize", {"tokens": found["tokens"]}).json() == {"text": text}
    chat = post(server, "/v1/tokenize", {"messages": HELLO}).json()
    body = {"model": server.model(), "messages": HELLO}
    rendered = post(server, "/v1/chat/completions/render", body).json()["prompts"][0]
    assert rendered["token_ids"] == chat["tokens"]
    assert rendered["prompt"].endswith("<|im_start|>assistant\n")
    assert post(server, "/tokenize", {"prompt": "x " * 2000}).json()["count"] > 512
    assert post(server, "/tokenize", {"prompt": ""}).json()["count"] == 0


def test_an_operator_flushes_pauses_and_aborts(server: Server) -> None:
    model = server.model()
    prompt = "many rooms " * 12
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 2}}
    post(server, "/generate", body)
    assert post(server, "/generate", body).json()["meta_info"]["cached_tokens"] > 0
    assert post(server, "/flush_cache", headers={"authorization": "Bearer x"}).status_code == 401
    assert post(server, "/flush_cache?timeout=20", headers=ADMIN).json()["success"]
    assert post(server, "/generate", body).json()["meta_info"]["cached_tokens"] == 0

    def load() -> dict[str, Any]:
        found: dict[str, Any] = server.get("/v1/loads").json()["loads"][0]
        return found

    def control(path: str, body: Any = None) -> None:
        assert post(server, path, body, headers=ADMIN).json()["success"]

    long = {"model": model, "prompt": "x", "max_tokens": 480, "ignore_eos": True}
    control("/pause_generation")
    with ThreadPoolExecutor(1) as pool:

        def ask() -> Future[httpx.Response]:
            return pool.submit(
                lambda: post(server, "/v1/completions", long, headers={"x-request-id": "job-7"})
            )

        answer = ask()
        eventually(lambda: load()["num_waiting_reqs"] == 1, "it waits")
        # It has some tokens now, and its pages: nothing is flushed under it.

        def begins() -> bool:
            """It may not have got so far when it was paused again, or have come to its end."""
            nonlocal answer
            if answer.done():
                answer = ask()
            control("/continue_generation")
            control("/pause_generation", {"mode": "in_place"})
            return bool(load()["num_running_reqs"] == 1)

        eventually(begins, "it runs, and is paused")
        assert load()["is_paused"]
        assert post(server, "/flush_cache", headers=ADMIN).status_code == 400
        # Given back, they can be.
        control("/pause_generation", {"mode": "retract"})
        control("/flush_cache?timeout=20")
        assert load()["num_waiting_reqs"] == 1
        control("/abort_request", {"rid": "job-"})
        assert answer.result().json()["choices"][0]["finish_reason"] == "abort"
    control("/continue_generation")
    assert post(server, "/generate", body).json()["meta_info"]["completion_tokens"] == 2
    info = server.get("/server_info").json()
    assert info["model"]["context_length"] == 512 and not info["internal_states"][0]["is_paused"]
    assert "admin-key" not in str(info)
