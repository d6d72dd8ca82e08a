"""This file describes tools to a model whose chat template knows none.

It does not know templates: it changes the messages that they will show. The form is that of
Hermes, which is also what the gateway reads where it knows of no other.
Laws: a conversation without tools is left as it is; nothing of a message is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

HEAD = (
    "You may call functions to answer. Their signatures, one a line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with a JSON object of its name and arguments between these tags:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{...}}}}\n</tool_call>'
)


def knows_tools(template: str) -> bool:
    return "tools" in template or "tool_call" in template


def with_tools(messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
    """The messages with all that has to do with tools written out as text."""
    has_calls = any(
        message.get("tool_calls") or message.get("role") == "tool" for message in messages
    )
    if not tools and not has_calls:
        return messages
    shown = [written(message) for message in messages]
    if not tools:
        return shown
    head = HEAD.format(tools="\n".join(dump(tool) for tool in tools))
    if shown and shown[0].get("role") == "system":
        first = {**shown[0], "content": f"{shown[0].get('content') or ''}\n\n{head}"}
        return [first, *shown[1:]]
    return [{"role": "system", "content": head}, *shown]


def written(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {**message, "role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message.get("content") else []
    texts += [f"<tool_call>\n{dump(call.get('function', call))}\n</tool_call>" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
