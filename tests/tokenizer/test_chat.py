"""This file tests the rendering of conversations."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import pytest

from actors.tokenizer.chat import ChatTemplates
from actors.tokenizer.prompt import Refused
from messages.tokenizer import Chat
from messages.types import Fault

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ message.role }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
)
USER = {"role": "user", "content": "Finish:"}


def chat(*messages: Any, **fields: Any) -> Chat:
    return Chat(msgspec.json.encode(messages), **fields)


def render(source: str | dict[str, str], chat: Chat, **named: str) -> str:
    sources = {"default": source} if isinstance(source, str) else source
    return ChatTemplates(sources, named).render(chat, chars_max=100_000, context_len=1000)


def refused(source: str | dict[str, str], chat: Chat) -> tuple[str | None, str]:
    with pytest.raises(Refused) as raised:
        render(source, chat)
    assert raised.value.problem.fault is Fault.INVALID
    return raised.value.problem.param, raised.value.problem.message


def test_messages_come_out_in_the_models_form() -> None:
    assert render(CHATML, chat({"role": "system", "content": "S"}, USER)) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nFinish:<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("odd", ["\0", "\x01", "\u200b", "\ufeff", "🦊", "{{ 7 * 7 }}", "<b>&"])
def test_odd_characters_are_neither_dropped_nor_run(odd: str) -> None:
    """B085."""
    text = f"alpha{odd} omega: answer"
    assert text in render(CHATML, chat({"role": "user", "content": text}))


def test_a_templates_refusal_reaches_the_caller_in_its_own_words() -> None:
    """B081."""
    param, message = refused(GEMMA, chat(USER, USER))
    assert param == "messages"
    assert "Conversation roles must alternate user/assistant" in message


def test_what_a_template_cannot_render_is_the_callers_400_without_our_insides() -> None:
    param, message = refused(CHATML, chat({"role": "user"}))
    assert (param, message) == (
        "messages",
        "The chat template of this model cannot render this conversation.",
    )


def test_the_special_tokens_are_known_to_the_template() -> None:
    assert render(GEMMA, chat(USER), bos_token="<bos>").startswith("<bos><start_of_turn>user")


def test_developer_is_system_unless_the_template_knows_it() -> None:
    developer = chat({"role": "developer", "content": "D"})
    assert "<|im_start|>system\nD" in render(CHATML, developer)
    knows = "{% for m in messages %}{% if m.role == 'developer' %}DEV{% endif %}{% endfor %}"
    assert render(knows, developer) == "DEV"


@pytest.mark.parametrize(
    "content", ["The sky is", "The sky is ", "", "a <|im_end|> b", "{% raw %}"]
)
def test_a_continued_message_ends_the_prompt_exactly(content: str) -> None:
    """B089."""
    asked = chat(
        USER,
        {"role": "assistant", "content": content},
        add_generation_prompt=False,
        continue_final_message=True,
    )
    for source in (CHATML, GEMMA):
        text = render(source, asked, bos_token="")
        assert text.endswith(f"assistant\n{content}")
        assert text == render(source, asked, bos_token="")


def test_a_repeated_text_is_continued_at_its_last_place() -> None:
    again = {"role": "assistant", "content": "Finish:"}
    asked = chat(USER, again, add_generation_prompt=False, continue_final_message=True)
    assert render(CHATML, asked).count("Finish:") == 2


def test_continuing_and_starting_a_message_exclude_each_other() -> None:
    param, _ = refused(CHATML, chat(USER, continue_final_message=True))
    assert param == "continue_final_message"


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    asked = chat(USER, add_generation_prompt=False, continue_final_message=True)
    param, message = refused("nothing", asked)
    assert param == "continue_final_message" and "cannot be continued" in message


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "bos_token"],
)
def test_a_request_cannot_replace_what_is_ours(name: str) -> None:
    """B091."""
    kwargs = msgspec.json.encode({name: 1})
    asked = chat(USER, template_kwargs_json=kwargs)
    with pytest.raises(Refused, match=name) as raised:
        render(CHATML, asked, bos_token="<s>")
    assert raised.value.problem.param == "chat_template_kwargs"


def test_a_request_can_set_what_its_template_asks_for() -> None:
    source = "{{ 'on' if enable_thinking else 'off' }}"
    for value, text in ((True, "on"), (False, "off")):
        kwargs = msgspec.json.encode({"enable_thinking": value})
        assert render(source, chat(USER, template_kwargs_json=kwargs)) == text


def test_tools_choose_the_template_that_is_for_them() -> None:
    sources = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    assert render(sources, chat(USER)) == "plain"
    assert render(sources, chat(USER, tools_json=b'[{"name": "look"}]')) == "look"
    assert render({"only": "one"}, chat(USER)) == "one"


def test_a_model_without_a_template_takes_no_messages() -> None:
    param, message = refused({}, chat(USER))
    assert param == "messages"
    assert "/v1/completions" in message and "--chat-template" in message


def test_the_date_is_the_requests_own() -> None:
    source = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no date' }}"
    then_s = 1_700_000_000.0
    assert render(source, chat(USER)) == "no date"
    dated = render(source, chat(USER, created_s=then_s))
    assert dated == datetime.fromtimestamp(then_s).strftime("%d %b %Y")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages_json": b"["}, "messages"),
        ({"messages_json": b"{}"}, "messages"),
        ({"messages_json": b"[]"}, "messages"),
        ({"messages_json": b'["x"]'}, "messages"),
        ({"messages_json": b"[" * 5000}, "messages"),
        ({"tools_json": b"{}"}, "tools"),
        ({"template_kwargs_json": b"[]"}, "chat_template_kwargs"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_field(
    fields: dict[str, bytes], param: str
) -> None:
    asked = Chat(**{"messages_json": b'[{"role": "user", "content": "x"}]', **fields})
    assert refused(CHATML, asked)[0] == param


def test_a_conversation_far_beyond_the_context_is_refused_before_it_is_rendered() -> None:
    asked = chat({"role": "user", "content": "a" * 500_000})
    with pytest.raises(Refused) as raised:
        render(CHATML, asked)
    assert raised.value.problem.code == "context_length_exceeded"


def test_a_template_that_a_request_brings_goes_before_the_models() -> None:
    templates = ChatTemplates({"default": "model"}, {"bos_token": "<s>"})
    chat = Chat(
        b'[{"role": "user", "content": "hi"}]', template="{{ bos_token }}{{ messages[0].content }}"
    )
    assert templates.render(chat, chars_max=100, context_len=9) == "<s>hi"
    for source in ("{{ x", "{% include 'x' %}", "{{ 'a' * 1000000000 }}"):
        with pytest.raises(Refused) as caught:
            templates.render(
                msgspec.structs.replace(chat, template=source), chars_max=100, context_len=9
            )
        assert "Traceback" not in caught.value.problem.message
