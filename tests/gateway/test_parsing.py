"""Texts that a model has written, read for whoever asks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.street import Street

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "sub"}}
CALL = '<tool_call>\n{"name": "sub", "arguments": {"a": 1}}\n</tool_call>'


async def test_calls_are_found_in_a_text() -> None:
    street = Street()
    hermes, json, none = await street.finish(
        street.request(
            "POST", "/parse_function_call", {"text": "So: " + CALL, "tools": [TOOL, OTHER]}
        ),
        street.request(
            "POST",
            "/parse_function_call",
            {
                "text": '[{"name": "add", "arguments": {}}]',
                "tools": [TOOL],
                "tool_call_parser": "json",
            },
        ),
        street.request("POST", "/parse_function_call", {"text": "no call", "tools": [TOOL]}),
    )
    assert hermes.json()["normal_text"].strip() == "So:"
    assert hermes.json()["calls"] == [{"tool_index": 1, "name": "sub", "parameters": '{"a": 1}'}]
    assert [call["name"] for call in json.json()["calls"]] == ["add"]
    assert none.json() == {"normal_text": "no call", "calls": []}
    street.assert_idle()


async def test_reasoning_is_put_apart() -> None:
    street = Street()
    body = {"text": "<think>hm</think>So.", "reasoning_parser": "think"}
    got = await street.ask(street.request("POST", "/separate_reasoning", body))
    assert got.json() == {"reasoning_text": "hm", "text": "So."}
    street.assert_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/parse_function_call", {"text": "x"}, "tools"),
        ("/parse_function_call", {"text": "x", "tools": []}, "tools"),
        ("/parse_function_call", {"text": "x", "tools": [TOOL, TOOL]}, "tools"),
        ("/parse_function_call", {"tools": [TOOL]}, "text"),
        (
            "/parse_function_call",
            {"text": "x", "tools": [TOOL], "tool_call_parser": "nonsense"},
            "tool_call_parser",
        ),
        ("/separate_reasoning", {"text": "x"}, "reasoning_parser"),
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "nonsense"}, "reasoning_parser"),
    ],
)
async def test_a_field_is_refused_by_its_name(path: str, body: Any, param: str) -> None:
    street = Street()
    got = await street.ask(street.request("POST", path, body))
    assert got.status == 400 and got.error()["param"] == param
    street.assert_idle()
