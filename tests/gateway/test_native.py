"""Bodies of SGLang's native route and of those that look at tokens, and their answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.call import Row
from actors.gateway.dialect import Head, time_from
from actors.gateway.errors import Refused
from actors.gateway.inputs import Limits
from actors.gateway.native import read_generate
from actors.gateway.native_replies import Asked, GenerateStream, GenerateWriter
from actors.gateway.tokens import read_detokenize, read_tokenize
from messages.config import GatewayConfig
from messages.gateway import Delta, TokenLogprob
from messages.types import Fault, FinishReason, Problem, Usage, pack, unpack
from tests.gateway.street import CONTEXT, Street, V
from tests.gateway.test_anthropic import JSON, name_of

LIMITS = Limits(GatewayConfig(prompts_max=4), "M", V, context_len=64)
HEAD = Head("id", 100, "M", 100.0, lambda: 102.5)


def read(**fields: Any) -> Asked:
    body = {"text": "hi", **fields}
    return read_generate(msgspec.json.encode(body), LIMITS, lambda: 7)


def refused(**fields: Any) -> Problem:
    with pytest.raises(Refused) as caught:
        read(**fields)
    return caught.value.problem


PARAMS = [
    ({}, "max_tokens", 128),
    ({"max_new_tokens": 9}, "max_tokens", 9),
    ({"min_new_tokens": 3}, "min_tokens", 3),
    ({"temperature": 3.5}, "temperature", 3.5),
    ({}, "temperature", 1.0),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({"top_k": 3}, "top_k", 3),
    ({"top_k": -1}, "top_k", 0),
    ({"min_p": 0.1}, "min_p", 0.1),
    ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
    ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
    ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
    ({"stop_token_ids": [4, 3]}, "stop_ids", (3, 4)),
    ({"ignore_eos": True}, "ignore_eos", True),
    ({"logit_bias": {"5": 1.5}}, "logit_bias", ((5, 1.5),)),
    ({"sampling_seed": 5}, "seed", 5),
]


@pytest.mark.parametrize(("params", "name", "value"), PARAMS, ids=str)
def test_a_sampling_parameter_is_honoured(params: Any, name: str, value: Any) -> None:
    variant = read(sampling_params=params).call.variant(0)
    assert getattr(variant.sampling, name) == value


HONOURED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"sampling_params": {"stop": "a"}}, lambda ask: ask.call.variant(0).stop.strings, ("a",)),
    (
        {"sampling_params": {"no_stop_trim": True}},
        lambda ask: ask.call.variant(0).stop.keep_match,
        True,
    ),
    (
        {"sampling_params": {"skip_special_tokens": False}},
        lambda ask: ask.call.variant(0).stop.skip_special,
        False,
    ),
    ({"sampling_params": {"regex": "a+"}}, lambda ask: ask.call.variant(0).grammar.kind, "regex"),
    ({"sampling_params": {"ebnf": "r"}}, lambda ask: ask.call.variant(0).grammar.kind, "ebnf"),
    (
        {"sampling_params": {"json_schema": '{"type":"array"}'}},
        lambda ask: ask.call.variant(0).grammar.text,
        '{"type":"array"}',
    ),
    ({"sampling_params": {"n": 3}}, lambda ask: (ask.call.choice_count, ask.is_list), (3, True)),
    ({"stream": True}, lambda ask: ask.stream, True),
    ({"rid": "r"}, lambda ask: ask.rids, ("r",)),
    ({"text": ["a", "b"], "rid": "r"}, lambda ask: ask.rids, ("r_0", "r_1")),
    ({"text": ["a", "b"], "rid": ["r", "s"]}, lambda ask: ask.rids, ("r", "s")),
    ({"priority": 4}, lambda ask: ask.call.priority, 4),
    ({"cache_salt": "s"}, lambda ask: ask.call.namespace, "salt:s"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 2}, lambda ask: ask.logprobs, (2,)),
    (
        {"text": ["a", "b"], "return_logprob": [True, False]},
        lambda ask: (ask.logprobs, ask.call.variant(1).sampling.logprobs),
        ((0, None), None),
    ),
    ({"logprob_start_len": 0}, lambda ask: ask.logprobs, (None,)),
    ({"return_text_in_logprobs": True}, lambda ask: ask.with_text, True),
    ({"return_prompt_token_ids": True}, lambda ask: ask.call.checked_first, True),
    (
        {"text": None, "input_ids": [4, 5]},
        lambda ask: list(unpack(ask.call.prompts[0].ids)),
        [4, 5],
    ),
    ({"text": None, "input_ids": [[4], [5]]}, lambda ask: len(ask.call.prompts), 2),
    (
        {"text": ["a", "b"], "sampling_params": [{"top_k": 1}, {"top_k": 2}]},
        lambda ask: [ask.call.variant(i).sampling.top_k for i in range(2)],
        [1, 2],
    ),
    ({"sampling_params": {"max_new_tokens": 0}}, lambda ask: ask.call.prompt_only, True),
]


@pytest.mark.parametrize(("fields", "look", "value"), HONOURED, ids=name_of)
def test_a_field_is_honoured(fields: dict[str, Any], look: Any, value: Any) -> None:
    assert look(read(**fields)) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"log_metrics": True, "no_logs": True, "background": False},
        {"image_data": None, "lora_path": None, "return_hidden_states": False},
        {"sampling_params": {"spaces_between_special_tokens": True, "stream_interval": 4}},
        {"sampling_params": {"custom_params": None, "stop": []}},
        {"routing_key": "x"},
    ],
    ids=str,
)
def test_a_field_is_taken_and_changes_nothing(fields: dict[str, Any]) -> None:
    assert read(**fields) == read()


def test_salts_and_keys_keep_prefixes_apart() -> None:
    spaces = {
        read(**fields).call.namespace
        for fields in ({}, {"cache_salt": "a"}, {"extra_key": "b"}, {"cache_salt": "b"})
    }
    assert len(spaces) == 3, "a key and a salt of the same text are one"
    assert read(cache_salt="a", extra_key="b").call.namespace not in spaces


LACKING = (
    "input_embeds image_data video_data audio_data modalities token_ids_logprob "
    "return_hidden_states return_routed_experts return_entropy return_sampling_mask session_id "
    "session_params lora_path custom_logit_processor bootstrap_host max_thinking_tokens"
).split()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: "x"}, name) for name in LACKING),
        ({"sampling_params": {"custom_params": {"x": 1}}}, "sampling_params.custom_params"),
        ({"sampling_params": {"structural_tag": {"x": 1}}}, "sampling_params.structural_tag"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 1.5}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"sampling_params": {"stop_regex": ["a", "^b"]}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"logit_bias": {str(V): 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"stop_token_ids": [V]}}, "sampling_params.stop_token_ids"),
        (
            {"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 2}},
            "sampling_params.min_new_tokens",
        ),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        (
            {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
            "sampling_params.n",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 0}, {}]},
            "sampling_params.max_new_tokens",
        ),
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a"] * 5}, "text"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": None, "input_ids": [1, [2]]}, "input_ids"),
        ({"text": None, "input_ids": [V]}, "input_ids"),
        ({"text": None, "input_ids": [-1]}, "input_ids"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid"),
        ({"top_logprobs_num": 21}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"stream": "yes"}, "stream"),
    ],
    ids=name_of,
)
def test_a_field_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    problem = refused(**fields)
    assert problem.fault is Fault.INVALID and problem.param == param
    assert "max_tokens" not in problem.message.replace("`min_tokens`", "")


@pytest.mark.parametrize(("start", "wanted"), [(0, 2), (5, 2), (-1, None), (None, None)])
def test_log_probabilities_of_the_prompt_are_asked_for(
    start: int | None, wanted: int | None
) -> None:
    ask = read(return_logprob=True, logprob_start_len=start, top_logprobs_num=2)
    assert ask.call.variant(0).sampling.prompt_logprobs == wanted
    assert ask.start_lens == (None if wanted is None else start,)
    assert read(logprob_start_len=start).call.variant(0).sampling.prompt_logprobs is None


FIELDS = ["text", "input_ids", "sampling_params", "rid", "return_logprob", "top_logprobs_num"]


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_the_body_it_is_read_or_refused(fields: dict[str, Any]) -> None:
    for reader, given_fields in (
        (read_generate, {"text": "hi", **fields}),
        (read_tokenize, {"prompt": fields.get("text"), "messages": fields.get("rid")}),
        (read_detokenize, {"tokens": fields.get("input_ids")}),
    ):
        try:
            assert reader(msgspec.json.encode(given_fields), LIMITS, lambda: 7).call.prompts
        except Refused as error:
            assert error.problem.fault is Fault.INVALID


# Answers


def row(choice: int, text: str, index: int, finish: FinishReason | None = None) -> Row:
    usage = None
    if finish is not None or index == 0:
        usage = Usage(5, index + 1 if finish else 0, 2)
    token = TokenLogprob(text.encode(), 40 + index, -0.5, ((b"z", 9, float("-inf")),))
    delta = Delta(
        request=f"c.{choice}",
        attempt=1,
        index=index,
        token_count=1,
        text=text,
        token_ids=pack([40 + index]),
        logprobs=(token,),
        finish=finish,
        usage=usage,
    )
    return Row(choice, delta)


def both(ask: Asked, rows: list[Row]) -> tuple[list[Any], Any]:
    stream = GenerateStream(ask, HEAD, [])
    data = b"".join(stream.write([one]) for one in rows) + stream.end([])
    blocks = data.decode().split("\n\n")[:-1]
    assert blocks[-1] == "data: [DONE]" and data.count(b"[DONE]") == 1
    whole = GenerateWriter(ask, HEAD, [])
    whole.add(rows)
    events = [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks[:-1]]
    return events, msgspec.json.decode(whole.body([]))


def test_the_last_event_is_the_answer() -> None:
    ask = read(return_logprob=True, top_logprobs_num=1, return_text_in_logprobs=True, rid="r")
    events, whole = both(ask, [row(0, "a", 0), row(0, "b", 1), row(0, "c", 2, FinishReason.LENGTH)])
    assert [event["text"] for event in events] == ["a", "ab", "abc"]
    assert events[-1] == whole
    meta = whole["meta_info"]
    assert meta["id"] == "r" and meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (5, 2, 3)
    assert meta["output_token_logprobs"][1] == [-0.5, 41, "b"]
    assert meta["output_top_logprobs"][0] == [[-9999.0, 9, "z"]]
    assert meta["input_token_logprobs"] == [] and meta["e2e_latency"] == 2.5
    assert events[0]["meta_info"]["finish_reason"] is None
    assert events[0]["meta_info"]["prompt_tokens"] == 5
    assert events[0]["meta_info"]["completion_tokens"] == 1


def test_a_batch_has_an_index_in_its_stream_and_its_order_in_the_list() -> None:
    ask = read(text=["x", "y"], stream=True)
    events, whole = both(
        ask, [row(1, "b", 0, FinishReason.STOP), row(0, "a", 0, FinishReason.ABORT)]
    )
    assert [event["index"] for event in events] == [1, 0]
    assert [answer["text"] for answer in whole] == ["a", "b"]
    assert whole[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert [answer["meta_info"]["id"] for answer in whole] == ["id_0", "id_1"]
    assert "output_token_logprobs" not in whole[0]["meta_info"]


def prompt_row(ids: list[int], begin: int) -> Row:
    told = tuple(TokenLogprob(b"p", i, -float(i), ((b"q", 9, -0.1),)) for i in ids)
    return Row(0, Delta("c.0", 1, 0, 0, prompt_logprobs=told, prompt_index=begin))


def test_log_probabilities_of_the_prompt_begin_where_they_are_wanted() -> None:
    rows = [
        prompt_row([1, 2, 3], 0),
        prompt_row([3, 4], 2),  # some come again after a loss
        row(0, "a", 0),
        row(0, "b", 1, FinishReason.STOP),
    ]
    for start, own in ((0, [[None, 1, None], [-2.0, 2, None]]), (2, [])):
        fields = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
        events, whole = both(read(**fields), rows)
        meta = whole["meta_info"]
        assert meta["input_token_logprobs"] == [*own, [-3.0, 3, None], [-4.0, 4, None]]
        assert meta["input_top_logprobs"][-1] == [[-0.1, 9, None]]
        assert len(meta["input_top_logprobs"]) == len(meta["input_token_logprobs"])
        assert [event["text"] for event in events] == ["a", "ab"]
        assert events[-1] == whole


def test_with_no_new_tokens_only_the_prompt_is_told_of() -> None:
    ask = read(return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    assert ask.drops_output and not ask.call.prompt_only
    events, whole = both(ask, [prompt_row([1, 2], 0), row(0, "a", 0, FinishReason.LENGTH)])
    assert (whole["text"], whole["output_ids"]) == ("", [])
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert whole["meta_info"]["completion_tokens"] == 0
    assert whole["meta_info"]["output_token_logprobs"] == []
    assert len(whole["meta_info"]["input_token_logprobs"]) == 2
    assert events == [whole]


# The routes


async def test_the_route_answers_what_each_prompt_asks_for() -> None:
    street = Street()
    body = {
        "text": ["one two three", "four five six"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        "return_prompt_token_ids": True,
    }
    plain, stream, none = await street.finish(
        street.request("POST", "/generate", body),
        street.request("POST", "/generate", {**body, "stream": True}),
        street.request(
            "POST", "/generate", {"text": "a b", "sampling_params": {"max_new_tokens": 0}}
        ),
    )
    first, second = plain.json()
    assert len(first["output_ids"]) == 1 and len(second["output_ids"]) == 2
    assert first["meta_info"]["prompt_token_ids"] == [0, 1, 2]
    events = [block for block in stream.body.split(b"\n\n") if block]
    assert events[-1] == b"data: [DONE]" and len(events) == 4
    assert none.json()["text"] == "" and none.json()["meta_info"]["prompt_tokens"] == 2
    street.assert_idle()


async def test_errors_have_openais_shape() -> None:
    street = Street()
    got = await street.ask(street.request("POST", "/generate", {"text": "w " * 200}))
    assert got.status == 400 and got.error()["code"] == "context_length_exceeded"
    got = await street.ask(street.request("GET", "/generate"))
    assert got.status == 405 and got.error()
    street.assert_idle()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokens_are_looked_at(prefix: str) -> None:
    street = Street()
    texts, chat, ids, long = await street.finish(
        street.request("POST", f"{prefix}/tokenize", {"prompt": ["a b", ""]}),
        street.request(
            "POST",
            f"{prefix}/tokenize",
            {"messages": [{"role": "user", "content": "a b c"}], "model": "M"},
        ),
        street.request("POST", f"{prefix}/detokenize", {"tokens": [[3, 4], []]}),
        street.request("POST", f"{prefix}/tokenize", {"prompt": "w " * 2 * CONTEXT}),
    )
    assert texts.json() == {"tokens": [[0, 1], []], "count": [2, 0], "max_model_len": CONTEXT}
    assert chat.json() == {"tokens": [0, 1, 2], "count": 3, "max_model_len": CONTEXT}
    assert ids.json() == {"text": ["w3 w4", ""]}
    assert long.json()["count"] == 2 * CONTEXT
    street.assert_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "X"}, "model"),
        ("/tokenize", {"messages": [], "model": "M"}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [V]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/v1/completions/render", {"model": "M", "prompt": []}, "prompt"),
        ("/v1/chat/completions/render", {"model": "M", "messages": []}, "messages"),
    ],
)
async def test_what_looks_at_tokens_refuses_by_name(path: str, body: Any, param: str) -> None:
    street = Street()
    got = await street.ask(street.request("POST", path, body))
    assert got.status in (400, 404)
    assert got.error()["param"].split("[")[0] == param
    street.assert_idle()


async def test_a_rendering_is_what_the_model_would_read() -> None:
    street = Street()
    chat, texts = await street.finish(
        street.request(
            "POST",
            "/v1/chat/completions/render",
            {"model": "M", "messages": [{"role": "user", "content": "a b"}], "n": 2},
        ),
        street.request("POST", "/v1/completions/render", {"model": "M", "prompt": ["a", "b c"]}),
    )
    assert chat.json()["prompts"] == [{"prompt": "a b", "token_ids": [0, 1], "count": 2}]
    assert [prompt["count"] for prompt in texts.json()["prompts"]] == [1, 2]
    assert texts.json()["max_model_len"] == CONTEXT
    street.assert_idle()


def test_what_ends_or_holds_the_text_is_that_of_completions() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": True}], "triggers": ["<f"]}
    for value in (tag, msgspec.json.encode(tag).decode()):
        grammar = read(sampling_params={"structural_tag": value}).call.variant(0).grammar
        assert grammar is not None and grammar.kind == "structural_tag"
    stop = read(sampling_params={"stop_regex": "a+b", "no_stop_trim": True}).call.variant(0).stop
    assert [pattern.text for pattern in stop.patterns] == ["a+b"] and stop.keep_match


def test_the_time_of_an_answer_goes_on_by_a_clock_that_nobody_sets() -> None:
    ticks = iter((5.0, 7.5))
    now_s = time_from(100.0, lambda: next(ticks))
    assert now_s() == 102.5
