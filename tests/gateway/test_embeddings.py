"""Bodies of /v1/embeddings and of Ollama's routes, one field at a time; and whole ways."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.call import Row
from actors.gateway.dialect import Head, Ready
from actors.gateway.embeddings import (
    EmbeddingWriter,
    cut,
    read_embed,
    read_embeddings,
    read_old_embeddings,
)
from actors.gateway.errors import Refused
from actors.gateway.inputs import Limits
from actors.gateway.readings import Wish
from bench.sim.vectors import vector_of
from messages.config import GatewayConfig
from messages.gateway import Delta
from messages.types import Fault, FinishReason, Usage, pack_floats, unpack, unpack_floats
from tests.gateway.street import Street
from tests.gateway.test_anthropic import JSON

LIMITS = Limits(GatewayConfig(prompts_max=3), "M", 100, context_len=64, hidden_len=4)
CUTS = LIMITS._replace(vector_lens=(2, 3))


def read(limits: Limits = LIMITS, **fields: Any) -> Wish:
    body = {"model": "M", "input": "hi", **fields}
    return read_embeddings(msgspec.json.encode(body), limits, lambda: 7, 9.0)


def test_a_text_is_one_prompt_that_ends_with_its_first_token() -> None:
    call = read(input="hi there").call
    assert [prompt.text for prompt in call.prompts] == ["hi there"]
    assert call.sampling.want_vector and call.sampling.max_tokens == 1
    assert call.sampling.temperature == 0.0 and not call.sampling.label_ids
    assert call.add_special and call.truncate_len is None and call.param == "input"


def test_several_texts_and_ids_are_several_prompts() -> None:
    assert [prompt.text for prompt in read(input=["a", "b"]).call.prompts] == ["a", "b"]
    (one,) = read(input=[5, 6]).call.prompts
    assert unpack(one.ids or b"").tolist() == [5, 6]
    many = read(input=[[5], [6, 7]]).call.prompts
    assert [unpack(prompt.ids or b"").tolist() for prompt in many] == [[5], [6, 7]]


def test_what_else_may_be_asked_is_honoured() -> None:
    wish = read(priority=3, rid="me", cache_salt="s", user="u", lora_path=None)
    assert wish.call.priority == 3 and wish.call.namespace == "salt:s" and wish.rid == "me"
    assert read(truncate_prompt_tokens=5).call.truncate_len == 5
    assert read(truncate_prompt_tokens=-1).call.truncate_len == 0
    assert not read(add_special_tokens=False).call.add_special


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "model"),
    ({"model": ""}, "model"),
    ({"input": []}, "input"),
    ({"input": ["a", 5]}, "input"),
    ({"input": [[1], "a"]}, "input"),
    ({"input": [100]}, "input"),
    ({"input": [[1], [-1]]}, "input[1]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": ["a"] * 4}, "input"),
    ({"input": 5}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"encoding_format": "int8"}, "encoding_format"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": 2}, "dimensions"),
    ({"dimensions": 5}, "dimensions"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"lora_path": "x"}, "lora_path"),
    ({"embed_overrides": [[0.1]]}, "embed_overrides"),
    ({"priority": "high"}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        read(**fields)
    problem = refused.value.problem
    assert problem.param == param
    assert problem.fault is (Fault.NOT_FOUND if param == "model" else Fault.INVALID)


def test_dimensions_are_those_that_the_models_config_allows() -> None:
    assert read(dimensions=4).given.dimensions == 4  # all of them are no cut
    for allowed in (2, 3, 4):
        read(CUTS, dimensions=allowed)
        read(LIMITS._replace(vector_lens=()), dimensions=allowed)
    for wrong in (1, 5):
        with pytest.raises(Refused, match="2, 3"):
            read(CUTS, dimensions=wrong)
    with pytest.raises(Refused, match="1 to 4"):
        read(LIMITS._replace(vector_lens=()), dimensions=5)


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9), st.integers(1, 12))
def test_what_is_cut_has_length_one_again(values: list[float], dimensions: int) -> None:
    found = cut(array("f", values), dimensions)
    assert len(found) == min(dimensions, len(values))
    if dimensions >= len(values):
        assert found.tolist() == values
        return
    length = math.sqrt(sum(value * value for value in found))
    assert length == pytest.approx(1.0, abs=1e-6) or not any(values[:dimensions])


@given(JSON | st.dictionaries(st.sampled_from(["model", "input", "dimensions", "rid"]), JSON))
def test_any_body_is_read_or_refused(value: Any) -> None:
    for reader in (read_embeddings, read_embed, read_old_embeddings):
        try:
            reader(msgspec.json.encode(value), CUTS, lambda: 7, 9.0)
        except (Refused, Ready):
            pass


def write(wish: Wish, *vectors: list[float]) -> Any:
    writer = EmbeddingWriter(wish, Head("embd-1", 9, "M"), ())
    for index, values in reversed(list(enumerate(vectors))):
        end = Delta("r", 1, 0, 1, finish=FinishReason.LENGTH, usage=Usage(5 + index, 1))
        writer.add([Row(index, msgspec.structs.replace(end, vector=pack_floats(values)))])
    return msgspec.json.decode(writer.body(()))


def test_an_answer_has_a_vector_for_each_input_in_order() -> None:
    answer = write(read(input=["a", "b"]), [1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0])
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.0, 0.0, 0.0]},
            {"object": "embedding", "index": 1, "embedding": [0.0, 0.5, 0.0, 0.0]},
        ],
        "model": "M",
        "usage": {"prompt_tokens": 11, "total_tokens": 11},
    }


def test_base64_holds_the_bytes_of_float32() -> None:
    values = [0.1, -0.7, 1e-30, 0.0]
    (row,) = write(read(encoding_format="base64"), values)["data"]
    assert unpack_floats(base64.b64decode(row["embedding"])) == array("f", values)
    (row,) = write(read(CUTS, encoding_format="base64", dimensions=2), [3.0, 4.0, 0.0, 0.0])["data"]
    assert unpack_floats(base64.b64decode(row["embedding"])) == array("f", [0.6, 0.8])


def test_what_ended_without_a_vector_is_no_answer() -> None:
    writer = EmbeddingWriter(read(), Head("embd-1", 9, "M"), ())
    writer.add([Row(0, Delta("r", 1, 0, 0, finish=FinishReason.ABORT, usage=Usage()))])
    with pytest.raises(Refused) as refused:
        writer.body(())
    assert refused.value.problem.fault is Fault.UNAVAILABLE


# The whole way


def expected(words: str) -> list[float]:
    cells = [(0, at, "") for at in range(len(words.split()))]
    return unpack_floats(vector_of(cells, read().call.sampling)).tolist()


async def ask(street: Street, path: str, **fields: Any) -> Any:
    return await street.ask(street.request("POST", path, {"model": "M", **fields}))


async def test_a_client_gets_its_vectors() -> None:
    street = Street()
    got = await ask(street, "/v1/embeddings", input=["one two", "three"])
    assert got.status == 200
    answer = got.json()
    assert [row["embedding"] for row in answer["data"]] == [expected("one two"), expected("three")]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    street.assert_idle()


async def test_the_vectors_of_a_whole_call_may_come_at_once_however_large_they_are() -> None:
    street = Street(stream_bytes_max=10_000)
    street.back.vector_bytes = 4 * 4096
    got = await ask(street, "/v1/embeddings", input=["one"] * 50)
    assert got.status == 200
    assert [len(row["embedding"]) for row in got.json()["data"]] == [4096] * 50
    street.assert_idle()


async def test_a_call_with_more_inputs_than_the_house_has_places_leaves_room_for_others() -> None:
    street = Street(slots=2, places=8)
    client = street.request("POST", "/v1/embeddings", {"model": "M", "input": ["a b", "c"] * 500})
    for _ in range(30):
        await street.step()
    assert not client.task.done()
    assert (await street.ask(street.chat("one two"))).status == 200
    got = await street.ask(client)
    assert got.status == 200
    answer = got.json()
    assert [row["index"] for row in answer["data"]] == list(range(1000))
    assert [row["embedding"] for row in answer["data"][:2]] == [expected("a b"), expected("c")]
    assert answer["usage"]["prompt_tokens"] == 1500
    street.assert_idle()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": ["a"] * 3}, "input"),
        ("/v1/completions", {"prompt": ["a"] * 3}, "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 3}, "n"),
        ("/generate", {"text": ["a"] * 3}, "text"),
        ("/generate", {"input_ids": [[5]] * 3}, "input_ids"),
        ("/generate", {"text": "a", "sampling_params": {"n": 3}}, "sampling_params.n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 3}, "documents"),
        ("/tokenize", {"prompt": ["a"] * 3}, "prompt"),
        ("/detokenize", {"tokens": [[5]] * 3}, "tokens"),
    ],
)
async def test_what_would_never_have_room_is_refused_by_its_field(
    path: str, fields: dict[str, Any], param: str
) -> None:
    street = Street(open_max=2)
    if path.startswith("/v1/"):
        fields["model"] = "M"
    got = await street.ask(street.request("POST", path, fields))
    assert got.status == 400 and got.error()["param"] == param
    street.assert_idle()


async def test_an_input_that_is_too_long_is_refused_as_such() -> None:
    street = Street()
    got = await ask(street, "/v1/embeddings", input=["one", "x " * 70])
    assert got.status == 400
    assert got.error()["code"] == "context_length_exceeded"
    street.assert_idle()


async def test_an_operator_who_ends_a_call_by_its_rid_leaves_no_half_an_answer() -> None:
    street = Street()
    street.back.paused = True
    client = street.request("POST", "/v1/embeddings", {"model": "M", "input": "a", "rid": "mine"})
    for _ in range(5):
        await street.step()
    assert street.gateway.abort("mi") == 1
    got = await street.ask(client)
    assert got.status == 503 and got.error()["code"] == "aborted"
    street.back.paused = False
    await street.settle()
    street.assert_idle()


async def test_a_client_that_leaves_has_its_requests_cancelled() -> None:
    street = Street()
    street.back.paused = True
    client = street.request("POST", "/v1/embeddings", {"model": "M", "input": ["a", "b"]})
    for _ in range(5):
        await street.step()
    client.drop()
    for _ in range(5):
        await street.step()
    assert len(street.back.cancelled) == 2
    await street.finish(client)
    street.assert_idle()


async def test_ollamas_clients_get_theirs() -> None:
    street = Street()
    answer = (await ask(street, "/api/embed", input=["one two", "three"])).json()
    assert answer["model"] == "M" and answer["prompt_eval_count"] == 3
    assert answer["embeddings"] == [expected("one two"), expected("three")]
    answer = (await ask(street, "/api/embed", input="three")).json()
    assert answer["embeddings"] == [expected("three")]
    assert (await ask(street, "/api/embeddings", prompt="three")).json() == {
        "embedding": expected("three")
    }
    street.assert_idle()


async def test_ollamas_clients_may_ask_whether_the_model_is_there() -> None:
    street = Street()
    for empty in ("", [], None):
        answer = (await ask(street, "/api/embed", input=empty)).json()
        assert answer == {"model": "M", "embeddings": []}
    assert (await ask(street, "/api/embeddings", prompt="")).json() == {"embedding": []}
    got = await ask(street, "/api/embed", model="other", input="a")
    assert got.status == 404 and "not found" in got.json()["error"]
    got = await ask(street, "/api/embed", input="a", dimensions=2)
    assert got.status == 400 and "dimensions" in got.json()["error"]


def test_ollama_cuts_what_is_too_long_unless_it_is_told_not_to() -> None:
    def truncate_len(**fields: Any) -> int | None:
        body = {"model": "M", "input": "a", **fields}
        return read_embed(msgspec.json.encode(body), LIMITS, lambda: 7).call.truncate_len

    assert truncate_len() == truncate_len(truncate=True) == 0
    assert truncate_len(truncate=False) is None
