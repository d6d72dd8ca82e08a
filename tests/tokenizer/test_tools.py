"""Tools for models whose template knows none."""

from __future__ import annotations

import json
from typing import Any

from actors.tokenizer.chat import ChatTemplates
from actors.tokenizer.tools import with_tools
from messages.tokenizer import Chat

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
AWARE = "{% if tools %}T{{ tools | length }}{% endif %}" + PLAIN
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def render(template: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    chat = Chat(
        json.dumps(messages).encode(), tools_json=json.dumps(tools).encode() if tools else b""
    )
    templates = ChatTemplates({"default": template}, {})
    return templates.render(chat, chars_max=10_000, context_len=100)


def test_tools_are_described_where_the_template_would_hide_them() -> None:
    user = {"role": "user", "content": "hi"}
    text = render(PLAIN, [user], TOOLS)
    assert text.startswith("[system]") and '"add"' in text and text.endswith("[user]hi")
    text = render(PLAIN, [{"role": "system", "content": "Be kind."}, user], TOOLS)
    assert text.startswith("[system]Be kind.") and text.count("[system]") == 1 and "add" in text
    assert render(AWARE, [user], TOOLS) == "T1[user]hi"
    assert render(PLAIN, [user]) == "[user]hi"


def test_calls_and_results_of_the_history_are_shown() -> None:
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    text = render(PLAIN, history)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert text.endswith("[user]<tool_response>\n3\n</tool_response>")


def test_a_plain_conversation_is_left_alone() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert with_tools(messages, None) is messages
