"""Bodies of the OpenAI dialect: what becomes a call, what is refused, and by which name."""

from __future__ import annotations

import math
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.call import run_encodes
from actors.gateway.errors import Refused, answer
from actors.gateway.inputs import Limits
from actors.gateway.openai import BIAS_COUNT_MAX, Ask, read_chat, read_completion
from messages.base import Address
from messages.config import GatewayConfig
from messages.tokenizer import Defaults
from messages.types import Fault, ProcessorCall, unpack

V = 100
ADDRESS = Address("n", "gateway", 1)
LIMITS = Limits(config=GatewayConfig(), model="M", vocab_size=V)


def chat(text: str = "hi", **fields: Any) -> Ask:
    body = {"model": "M", "messages": [{"role": "user", "content": text}], **fields}
    return read_chat(msgspec.json.encode(body), LIMITS, lambda: 77)


def completion(prompt: Any = "hi", **fields: Any) -> Ask:
    body = {"model": "M", "prompt": prompt, **fields}
    return read_completion(msgspec.json.encode(body), LIMITS, lambda: 77)


def refusal(read: Any, *args: Any, **fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        read(*args, **fields)
    refused: Refused = caught.value
    return refused


def param_of(read: Any, *args: Any, **fields: Any) -> str | None:
    """The field that a 400 names."""
    problem = refusal(read, *args, **fields).problem
    assert problem.fault is Fault.INVALID
    return problem.param


def messages_of(ask: Ask) -> list[dict[str, Any]]:
    prompt = ask.call.prompts[0].chat
    assert prompt is not None
    decoded: list[dict[str, Any]] = msgspec.json.decode(prompt.messages_json)
    return decoded


def test_a_chat_becomes_one_request_with_defaults() -> None:
    ask = chat()
    assert messages_of(ask) == [{"role": "user", "content": "hi"}]
    assert ask.call.request_count == 1
    assert not ask.call.checked_first
    assert ask.call.sampling.max_tokens == 0  # what is left of the context
    assert ask.call.sampling.seed == 77
    assert ask.logprobs is None and not ask.stream


def test_a_completion_has_sixteen_tokens_where_nothing_is_said() -> None:
    assert completion().call.sampling.max_tokens == 16
    assert completion().call.prompts[0].text == "hi"
    assert completion().call.stop.continues_prompt


def test_null_is_as_good_as_absent_for_every_field() -> None:
    bare = chat()
    fields = [name for name in GENERATION if name not in ("model", "messages")]
    assert chat(**dict.fromkeys(fields)) == bare
    assert completion(**dict.fromkeys(fields), logprobs=None) == completion()


GENERATION = (
    "max_tokens temperature top_p top_k min_p n seed stop stop_token_ids ignore_eos min_tokens "
    "skip_special_tokens presence_penalty frequency_penalty repetition_penalty logit_bias echo "
    "stream stream_options user metadata cache_salt priority functions tools tool_choice "
    "response_format audio suffix best_of chat_template chat_template_kwargs"
).split()


def test_unknown_fields_are_ignored() -> None:
    assert chat(verbosity="low", vendor={"x": [1]}) == chat()


# B037 NaN and infinity
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"'])
def test_numbers_that_are_none_are_refused_with_valid_json(field: str, value: str) -> None:
    body = f'{{"model":"M","messages":[{{"role":"user","content":"x"}}],"{field}":{value}}}'
    problem = refusal(read_chat, body.encode(), LIMITS, lambda: 1).problem
    assert problem.fault is Fault.INVALID
    assert "error" in msgspec.json.decode(answer(problem).body)
    bias = f'{{"model":"M","prompt":"x","logit_bias":{{"5":{value}}}}}'
    assert refusal(read_completion, bias.encode(), LIMITS, lambda: 1).problem


# B067, B063, B069, B039, B041, B049, B057: one field at a time, both routes
WRONG = [
    ("max_tokens", ["10", True, 1.5, -1, 1e30, [], {}, 2**31]),
    ("stream", ["true", 1]),
    ("n", [0, -1, 1.5, True, 129, 3_000_000]),
    ("seed", [2**63, 2**64, -(2**63) - 1, 1.5, "7"]),
    ("repetition_penalty", [0, 0.0, -1, 1e-30]),
    ("temperature", [-1, 2.5, "1", True]),
    ("top_p", [-0.1, 1.1]),
    ("min_p", [-0.1, 1.1]),
    ("top_k", [-2, 1.5, "3"]),
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("stop", [5, "", [""], ["", "x"], [1], ["x"] * 17, "x" * 1025]),
    ("stop_regex", [5, "", ["a", ""], "a*", "a$", "(", [1], ["x"] * 17, "x" * 1025]),
    ("stop_token_ids", [[V], [-1], ["1"], [2**70]]),
    ("logit_bias", [{str(V): 5}, {str(V + 100_000): -100}, {"-1": 5}, {"abc": 1}, {"5": 101}]),
    ("logit_bias", [{"5": "x"}, {"5": True}, [], {"": 1}, {"٣": 1}, {"1" * 5000: 1}]),
    ("logit_bias", [{str(i): 1 for i in range(BIAS_COUNT_MAX + 1)}]),
    ("min_tokens", [-1, "1"]),
    ("cache_salt", ["", "x" * 1025, 5]),
    ("priority", [2**31, "1"]),
    ("user", [5]),
    ("allowed_token_ids", [[], [V], [-1], ["1"], 5]),
    ("bad_words", ["x", [""], ["x" * 257], ["x"] * 257, [5]]),
    ("logits_processors", ["x", [{"name": "x"}] * 9]),
    ("truncate_prompt_tokens", [0, -2, "5"]),
    ("best_of", [0, 129, "2"]),
    ("return_token_ids", ["yes"]),
    ("stream_options", [True, {"include_usage": True}]),  # the latter without `stream`
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG for value in values]
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    for read in (chat, completion):
        param = param_of(read, **{field: value})
        assert param is not None
        assert param.split(".")[0].split("[")[0] == field


def test_the_bounds_themselves_are_taken() -> None:
    for seed in (0, -1, 2**31, 2**63 - 1, -(2**63)):
        assert chat(seed=seed).call.sampling.seed == seed
    assert chat(n=128).call.choice_count == 128
    for off in (V, V + 1, -1, 0, 10_000_001):
        assert chat(top_k=off).call.sampling.top_k == 0
    assert chat(top_k=1).call.sampling.top_k == 1
    assert chat(logit_bias={"0": -100, str(V - 1): 100}).call.sampling.logit_bias == (
        (0, -100.0),
        (V - 1, 100.0),
    )
    assert chat(repetition_penalty=5).call.sampling.repetition_penalty == 5.0
    assert chat(stop=[]).call.stop.strings == ()
    assert chat(stop="x" * 1024).call.stop.strings == ("x" * 1024,)


def test_stop_expressions_go_to_the_detokenizer_as_automata() -> None:
    for read in (chat, completion):
        stop = read(stop_regex=["a+b", r"\d{3}", "a+b"], stop="x", no_stop_trim=True).call.stop
        assert [pattern.text for pattern in stop.patterns] == ["a+b", r"\d{3}"]
        assert [len(pattern.classes) for pattern in stop.patterns] == [2, 3]
        assert (stop.strings, stop.keep_match) == (("x",), True)
        assert stop.pattern_chars_max == LIMITS.config.stop_chars_max
        assert read(stop_regex="a").call.stop.patterns[0].text == "a"
        assert read(stop_regex=[]).call.stop.patterns == ()


def test_the_expressions_of_a_request_share_one_bound() -> None:
    """B189: many that are fine by themselves can be too much together."""
    heavy = [f"(?:{'|'.join('abcdefghijklmnopqrst')})+{nth}" for nth in range(16)]
    assert chat(stop_regex=heavy[:2]).call.stop.patterns
    assert param_of(chat, stop_regex=heavy) == "stop_regex"


def test_top_p_zero_is_greedy() -> None:
    sampling = chat(top_p=0).call.sampling
    assert (sampling.top_k, sampling.top_p) == (1, 1.0)


# B049
def test_top_logprobs_go_from_zero_to_twenty_and_need_logprobs() -> None:
    for count in (0, 20):
        ask = chat(logprobs=True, top_logprobs=count)
        assert ask.logprobs == ask.call.sampling.logprobs == count
    for count in (-1, 21, 1_000_000, 1.5):
        assert param_of(chat, logprobs=True, top_logprobs=count) == "top_logprobs"
    assert param_of(chat, top_logprobs=3) == "top_logprobs"
    assert completion(logprobs=5).logprobs == 5
    assert param_of(completion, logprobs=21) == "logprobs"
    assert param_of(completion, logprobs=True) == "logprobs"


# B031
def test_no_tokens_at_all_is_asked_of_completions_only() -> None:
    ask = completion(max_tokens=0, echo=True)
    assert ask.prompt_only and ask.call.prompt_only and ask.call.checked_first
    assert ask.call.sampling.max_tokens == 1  # never the "rest of the context" of a 0
    assert param_of(chat, max_tokens=0) == "max_tokens"
    assert param_of(chat, max_completion_tokens=0) == "max_completion_tokens"
    assert chat(max_tokens=3, max_completion_tokens=5).call.sampling.max_tokens == 5


# B071, B073
@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [999_999_999],
        [V],
        [-1],
        [2**31],
        [2**63],
        [2**70],
        [1.5],
        [True],
        [[1, 2], [V]],
        ["a", 1],
        [1, [1]],
        [["a"]],
        ["x"] * 2049,
        {},
        5,
        None,
    ],
)
def test_prompts_that_are_none_are_refused(prompt: Any) -> None:
    param = param_of(completion, prompt)
    assert param is not None and param.startswith("prompt")


def test_prompts_are_one_string_one_list_of_ids_or_lists_of_either() -> None:
    assert completion("").call.prompts[0].text == ""  # the tokenizer judges it: a BOS may come
    ids = completion([1, V - 1]).call.prompts
    assert len(ids) == 1 and ids[0].ids is not None and list(unpack(ids[0].ids)) == [1, V - 1]
    assert [prompt.text for prompt in completion(["a", "b"]).call.prompts] == ["a", "b"]
    assert len(completion([[1], [2, 3]]).call.prompts) == 2


# B075, B065
def test_several_sequences_are_checked_before_any_runs() -> None:
    assert completion(["a", "b"]).call.checked_first
    assert completion("a", n=2).call.checked_first
    assert completion(["a", "b", "c"], n=2).call.request_count == 6


# B079
@pytest.mark.parametrize("role", ["user", "system", "assistant", "developer"])
def test_all_text_parts_appear_in_order_for_every_role(role: str) -> None:
    parts = [{"type": "text", "text": t} for t in ("My code is ", "4417. ", "Repeat it.")]
    ask = chat(messages=[{"role": role, "content": parts}])
    assert messages_of(ask)[0]["content"] == "My code is 4417. Repeat it."


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([], "messages[0].content"),
        ([{"text": "x"}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "image_url", "image_url": {"url": "u"}}], "messages[0].content[0].type"),
        (None, "messages[0].content"),
        (5, "messages[0].content"),
    ],
)
def test_content_that_is_no_text_is_refused(content: Any, param: str) -> None:
    assert param_of(chat, messages=[{"role": "user", "content": content}]) == param


# B083
def test_developer_is_system_and_other_roles_are_refused() -> None:
    assert messages_of(chat(messages=[{"role": "developer", "content": "x"}]))[0]["role"] == (
        "system"
    )
    for role in ("function", "robot", "", "USER", 5, None):
        param = param_of(chat, messages=[{"role": role, "content": "x"}])
        assert param == "messages[0].role"
    assert param_of(chat, messages=[]) == "messages"
    assert param_of(chat, messages={}) == "messages"
    assert param_of(chat, messages=[{"content": "x"}]) == "messages[0].role"


# B085
def test_a_nul_stays_in_its_message() -> None:
    text = "alpha\u0000 omega\u0001\u200b\ufeff"
    assert messages_of(chat(text))[0]["content"] == text


# B089
def test_continuing_the_last_message_excludes_a_generation_prompt() -> None:
    messages = [
        {"role": "user", "content": "Finish:"},
        {"role": "assistant", "content": "The sky is"},
    ]
    prompt = chat(messages=messages, continue_final_message=True).call.prompts[0].chat
    assert prompt is not None
    assert prompt.continue_final_message and not prompt.add_generation_prompt
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert param_of(chat, messages=messages, **both) == "continue_final_message"
    assert param_of(chat, continue_final_message=True) == "continue_final_message"
    ask = chat(messages=messages, continue_final_message=True, echo=True)
    assert ask.echoes == ("The sky is",)


# B091
def test_a_request_cannot_bring_a_template_or_internal_names() -> None:
    for kwargs in ({"chat_template": "{{ 7*7 }}"}, {"tokenize": True}, {"messages": []}):
        assert param_of(chat, chat_template_kwargs=kwargs) == "chat_template_kwargs"
    assert param_of(chat, chat_template_kwargs={"tools": 1}) == "chat_template_kwargs"
    assert param_of(chat, chat_template="{{ 7*7 }}") == "chat_template"
    assert param_of(completion, chat_template="x") == "chat_template"
    allowed = LIMITS._replace(config=GatewayConfig(request_templates=True))
    body = {"model": "M", "messages": [{"role": "user", "content": "x"}], "chat_template": "own"}
    brought = read_chat(msgspec.json.encode(body), allowed, lambda: 1).call.prompts[0].chat
    assert brought is not None and brought.template == "own"
    prompt = chat(chat_template_kwargs={"enable_thinking": False}).call.prompts[0].chat
    assert prompt is not None
    assert msgspec.json.decode(prompt.template_kwargs_json) == {"enable_thinking": False}


# B115, B117
def test_tools_are_not_looked_at_where_none_is_to_be_called() -> None:
    tool = [{"type": "function", "function": {"name": "f"}}]
    for tools in ({}, {"tools": tool}, {"tools": []}, {"tools": None}, {"tools": [5]}):
        assert chat(tool_choice="none", **tools) == chat()
    named = {"type": "function", "function": {"name": "f"}}
    for tools in ({}, {"tools": []}, {"tools": None}):
        assert param_of(chat, tool_choice="required", **tools) == "tools"
        assert param_of(chat, tool_choice=named, **tools) == "tools"
    assert chat(tool_choice="auto") == chat()


# B119, B121
def test_calls_of_the_history_go_to_the_template_whatever_their_arguments() -> None:
    for arguments, seen in (
        ("{}", {}),
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "x', '{"a": "x'),
        ("[1]", "[1]"),
        ("null", "null"),
    ):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": ""},
        ]
        read = messages_of(chat(messages=messages))
        assert read[0]["tool_calls"][0]["function"]["arguments"] == seen
        assert read[1] == {"role": "tool", "tool_call_id": "c", "content": ""}
    lonely = [{"role": "tool", "content": "x"}]
    assert param_of(chat, messages=lonely) == "messages[0].tool_call_id"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("response_format", "text"),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("suffix", "x"),
        ("best_of", True),
        ("use_beam_search", True),
        ("lora_path", "nope"),
        ("lora_path", ""),
        ("prompt_embeds", "x"),
        ("custom_logit_processor", '{"callable": "80049520"}'),
    ],
)
def test_fields_that_we_do_not_have_are_refused_by_name(field: str, value: Any) -> None:
    assert param_of(chat, **{field: value}) == field
    assert param_of(completion, **{field: value}) == field


def test_processors_are_named_with_their_parameters_unread() -> None:
    for read in (chat, completion):
        assert read().call.sampling.processors == ()
        wanted = [{"name": "a", "params": {"x": [1]}}, {"name": "b", "params": None}]
        calls = read(logits_processors=wanted).call.sampling.processors
        assert calls == (ProcessorCall("a", b'{"x":[1]}'), ProcessorCall("b"))
        for wrong in ({"name": ""}, {}, {"qualname": "os:system"}, {"name": "a", "code": "x"}):
            param = param_of(read, logits_processors=[wrong])
            assert param is not None and param.startswith("logits_processors[0]")


def test_rules_for_tokens_and_prompts_are_read() -> None:
    for read in (chat, completion):
        ask = read(allowed_token_ids=[9, 3, 9], bad_words=["x", "y", "x"], truncate_prompt_tokens=7)
        assert ask.call.sampling.allowed_ids == (3, 9)
        assert ask.call.bad_words == ("x", "y") and ask.call.truncate_len == 7
        assert read(truncate_prompt_tokens=-1).call.truncate_len == 0
        assert read(no_stop_trim=True, stop="a").call.stop.keep_match
        assert read(return_token_ids=True).call.checked_first
        assert read(return_token_ids=True, stream=True).call.checked_first


def test_what_a_request_does_not_say_the_model_recommends() -> None:
    limits = LIMITS._replace(defaults=Defaults(temperature=0.5, top_k=20, top_p=0.9))
    body = {"model": "M", "prompt": "x"}
    sampling = read_completion(msgspec.json.encode(body), limits, lambda: 1).call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 20, 0.9)
    said = {**body, "temperature": 0, "top_k": -1, "top_p": 1}
    sampling = read_completion(msgspec.json.encode(said), limits, lambda: 1).call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 1.0)


def test_log_probabilities_of_prompts_are_asked_of_the_model() -> None:
    assert chat(prompt_logprobs=3).call.sampling.prompt_logprobs == 3
    assert completion(prompt_logprobs=0).call.sampling.prompt_logprobs == 0
    echo = completion(echo=True, logprobs=2, prompt_logprobs=5)
    assert echo.call.sampling.prompt_logprobs == 5 and echo.logprobs == 2
    assert completion(logprobs=2).call.sampling.prompt_logprobs is None
    only = completion(echo=True, logprobs=2, max_tokens=0)
    assert only.drops_output and not only.call.prompt_only
    assert only.call.sampling.max_tokens == 1
    assert param_of(chat, prompt_logprobs=1, stream=True) == "prompt_logprobs"
    assert param_of(completion, echo=True, logprobs=1, stream=True) == "logprobs"
    first, second = run_encodes(completion(n=2, prompt_logprobs=1).call, "c", ADDRESS)
    assert (first.sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (1, None)


def test_the_best_of_several_completions_are_kept() -> None:
    ask = completion(best_of=5, n=2)
    assert (ask.call.choice_count, ask.kept_count, ask.logprobs) == (5, 2, None)
    assert ask.call.sampling.logprobs == 0
    assert completion(best_of=2, n=2) == completion(n=2)
    assert completion(best_of=1) == completion()
    for fields in ({"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}):
        assert param_of(completion, **fields) == "best_of"
    assert param_of(chat, best_of=2) == "best_of" and chat(best_of=1) == chat()


def test_neutral_values_of_such_fields_are_taken() -> None:
    plain = {"response_format": {"type": "text"}, "best_of": 1, "functions": [], "suffix": None}
    assert completion(**plain, use_beam_search=False) == completion()


# B157
@pytest.mark.parametrize("name", ["no-such-adapter", "", "m", "M:adapter", "x" * 10_000])
def test_another_model_is_not_found(name: str) -> None:
    problem = refusal(chat, model=name).problem
    assert (problem.fault, problem.code, problem.param) == (
        Fault.NOT_FOUND,
        "model_not_found",
        "model",
    )
    assert len(problem.message) < 300


def test_a_missing_field_is_named() -> None:
    for body in (b"{}", b'{"messages":[]}'):
        assert param_of(read_chat, body, LIMITS, lambda: 1) == "model"
    assert param_of(read_chat, b'{"model":"M"}', LIMITS, lambda: 1) == "messages"
    assert param_of(read_completion, b'{"model":"M"}', LIMITS, lambda: 1) == "prompt"


# B189, B191
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"5",
        b"\xff",
        b'{"model":"\\ud800"}',
        b'{"model":"M"} x',
        b"[" * 100_000,
        b'{"model":"M","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"M","tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"M","chat_template_kwargs":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"model":"M","response_format":' + b"[" * 300 + b"]" * 300 + b',"messages":[]}',
    ],
)
def test_bodies_that_are_no_request_are_refused(body: bytes) -> None:
    for read in (read_chat, read_completion):
        assert refusal(read, body, LIMITS, lambda: 1).problem.fault is Fault.INVALID


def test_many_messages_are_read_in_one_pass() -> None:
    turns = [{"role": r, "content": "x"} for _ in range(1000) for r in ("user", "assistant")]
    assert len(messages_of(chat(messages=turns))) == 2000
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]
    assert chat(tools=tools, tool_choice="none") == chat()


def test_salts_have_a_namespace_of_their_own() -> None:
    assert chat().call.namespace == ""
    assert chat(cache_salt="a").call.namespace == "salt:a"


def test_echo_of_ids_needs_their_text() -> None:
    ask = completion([1, 2], echo=True)
    assert ask.echoes == (None,) and ask.call.want_prompt_text and ask.call.checked_first
    ask = completion("abc", echo=True)
    assert ask.echoes == ("abc",) and not ask.call.checked_first


def test_min_tokens_cannot_be_more_than_the_limit() -> None:
    assert chat(min_tokens=5, max_tokens=5).call.stop.min_tokens == 5
    assert param_of(chat, min_tokens=6, max_tokens=5) == "min_tokens"
    assert chat(min_tokens=6).call.sampling.min_tokens == 6


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(string.printable, max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (*GENERATION, "model", "messages", "prompt", "logprobs", "top_logprobs", "min_tokens")


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5), st.booleans())
def test_any_body_is_a_call_or_a_refusal(fields: dict[str, Any], is_chat: bool) -> None:
    base: dict[str, Any] = {"model": "M", "messages": [{"role": "user", "content": "x"}]}
    base["prompt"] = "x"
    body = msgspec.json.encode({**base, **fields})
    try:
        ask = (read_chat if is_chat else read_completion)(body, LIMITS, lambda: 1)
    except Refused as refused:
        assert answer(refused.problem).status in (400, 404)
        return
    sampling = ask.call.sampling
    assert all(math.isfinite(x) for x in (sampling.temperature, sampling.top_p, sampling.min_p))
    assert 1 <= ask.call.choice_count <= 128


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused(body: bytes) -> None:
    assert refusal(read_chat, body, LIMITS, lambda: 1).problem.fault is Fault.INVALID
