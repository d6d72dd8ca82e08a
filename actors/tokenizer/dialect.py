"""This file tells from a model's chat template which formats the model answers in.

It does not know the parsers: it names them as the gateway's registries do. A guess: the settings
`--tool-call-parser` and `--reasoning-parser` go before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from messages.tokenizer import Defaults, Dialect

# What a template that speaks a format writes, most telling first.
TOOL_MARKS = (
    ("<|channel|>", "gpt-oss"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("Environment: ipython", "llama3"),
)
# Other formats write one of those marks too.
FOREIGN = {"hermes": ("<function=", "<arg_key>", "<parameter=")}
# The prompt for the answer is a text that ends inside of a reasoning.
OPEN = re.compile(r"<think>(?:\\n|\n)*['\"]")
PROMPT = "add_generation_prompt"


def dialect_of(templates: Mapping[str, str], defaults: Defaults | None = None) -> Dialect:
    """By the template for chats with tools, and the one for plain ones."""
    plain = templates.get("default") or next(iter(templates.values()), "")
    return Dialect(
        tool_parser=tool_parser_of(templates.get("tool_use") or plain),
        reasoning_parser=reasoning_parser_of(plain),
        defaults=defaults or Defaults(),
    )


# What a request could say itself; a recommendation beyond it is none.
BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def defaults_of(config: Any) -> Defaults:
    """From the content of a generation_config.json."""
    found: dict[str, Any] = {}
    for name, (low, high) in BOUNDS.items():
        value = config.get(name) if isinstance(config, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if low <= value <= high and (name != "top_k" or isinstance(value, int)):
            found[name] = value
    return Defaults(**found)


def tool_parser_of(template: str) -> str:
    for mark, name in TOOL_MARKS:
        if mark in template and not any(other in template for other in FOREIGN.get(name, ())):
            return name
    return ""


def reasoning_parser_of(template: str) -> str:
    if "<|channel|>" in template:
        return "gpt-oss"
    if "</think>" not in template and "<think>" not in template:
        return ""
    tail = template[max(template.rfind(PROMPT), 0) :]
    return "deepseek-r1" if OPEN.search(tail) and "</think>" not in tail else "think"
