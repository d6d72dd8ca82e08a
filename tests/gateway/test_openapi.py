"""The description of the routes: it is of those that there are, and the page is of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from actors.gateway.openapi import OPERATIONS, document
from bench.api_page import REFUSING, fields, page, schema_of
from messages.openai import CompletionBody
from messages.responses import ResponsesBody
from tests.gateway.street import Street

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "api.md"


def test_every_route_has_its_row() -> None:
    street = Street()
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in street.app.router.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    rows = [(row.method, row.path) for row in OPERATIONS]
    assert len(rows) == len(set(rows))
    assert set(rows) == routes


async def test_the_description_is_served_and_all_that_it_names_is_in_it() -> None:
    street = Street()
    got = await street.ask(street.request("GET", "/openapi.json"))
    assert got.status == 200
    found = got.json()
    assert found["openapi"].startswith("3.1") and found["info"]["version"]
    schemas = found["components"]["schemas"]
    ids = [one["operationId"] for path in found["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                assert reference.removeprefix("#/components/schemas/") in schemas
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)

    check(found)
    body = schemas["ResponsesBody"]
    assert set(body["required"]) == {"model", "input"}
    assert body["properties"]["temperature"]["anyOf"][0]["maximum"] == 2.0


def test_every_field_of_every_body_is_described() -> None:
    for row in OPERATIONS:
        if row.body is not None:
            names = {field.encode_name for field in msgspec.structs.fields(row.body)}
            assert set(schema_of(row)["properties"]) == names, row.path


def test_the_page_is_of_the_code() -> None:
    """Otherwise: python -m bench.api_page > docs/api.md"""
    assert PAGE.read_text("utf-8") == page()


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}


# What the official client could send in 2026, by route; of each the page must say something.
KNOWN = {
    "/v1/chat/completions": (
        "audio frequency_penalty function_call functions logit_bias logprobs "
        "max_completion_tokens max_tokens messages metadata modalities model moderation n "
        "parallel_tool_calls prediction presence_penalty prompt_cache_key "
        "prompt_cache_options prompt_cache_retention reasoning_effort response_format "
        "safety_identifier seed service_tier stop store stream stream_options temperature "
        "tool_choice tools top_logprobs top_p user verbosity web_search_options"
    ),
    "/v1/completions": (
        "best_of echo frequency_penalty logit_bias logprobs max_tokens model n "
        "presence_penalty prompt seed stop stream stream_options suffix temperature top_p "
        "user"
    ),
    "/v1/responses": (
        "background background_options context_management conversation image include input "
        "instructions max_output_tokens max_tool_calls metadata model moderation "
        "parallel_tool_calls previous_response_id prompt prompt_cache_key "
        "prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier "
        "store stream stream_options temperature text tool_choice tools top_logprobs top_p "
        "truncation user"
    ),
}


@pytest.mark.parametrize("path", KNOWN)
def test_the_page_says_something_of_all_that_the_official_client_can_send(path: str) -> None:
    (row,) = (row for row in OPERATIONS if row.path == path)
    names = {field.encode_name for field in msgspec.structs.fields(row.body)}
    assert set(KNOWN[path].split()) <= names


@pytest.mark.parametrize("path", BODIES)
async def test_what_the_page_calls_refused_is_refused_by_name(path: str) -> None:
    street = Street()
    (row,) = (row for row in OPERATIONS if row.path == path)
    names = [line.split("`")[1] for line in fields(row).splitlines() if "**refused**" in line]
    assert names
    for name in names:
        body = {"model": "M", **BODIES[path], name: {"a": 1}}
        got = await street.ask(street.request("POST", path, body))
        assert (got.status, got.error()["param"]) == (400, name)
        got = await street.ask(street.request("POST", path, {**body, name: None}))
        assert got.status == 200, name
    street.assert_idle()


def test_what_is_refused_is_a_field_of_the_dialect() -> None:
    assert all(kind.__struct_fields__ for kind in REFUSING)
    assert "`conversation` | **refused**" in page()
    assert issubclass(CompletionBody, REFUSING[0]) and issubclass(ResponsesBody, REFUSING[1])


def test_a_description_of_nothing_is_one() -> None:
    assert msgspec.json.decode(document("x", "1", ()))["paths"] == {}


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("/v1/chat/completions", {"error"}),
        ("/v1/messages", {"type", "error"}),
        ("/api/chat", {"error"}),
        ("/generate", {"error"}),
    ],
)
async def test_errors_are_described_as_their_dialect_has_them(path: str, keys: set[str]) -> None:
    found = msgspec.json.decode(document("x", "1"))
    answers = found["paths"][path]["post"]["responses"]
    (form,) = answers["4XX"]["content"].values()
    schema = found["components"]["schemas"][form["schema"]["$ref"].rsplit("/", 1)[1]]
    street = Street()
    got = await street.ask(street.request("POST", path, b"{"))
    assert got.status == 400 and set(got.json()) == keys == set(schema["properties"])
    is_text = schema["properties"]["error"].get("type") == "string"
    assert isinstance(got.json()["error"], str) == is_text
