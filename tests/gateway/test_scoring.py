"""Bodies of /v1/score and of the rankings to numbers: one field at a time, and whole ways."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.errors import Refused
from actors.gateway.inputs import Limits
from actors.gateway.readings import Wish
from actors.gateway.scoring import probabilities, read_rerank, read_score
from messages.config import GatewayConfig
from messages.types import Fault, unpack
from tests.gateway.street import Street
from tests.gateway.test_anthropic import JSON

LIMITS = Limits(GatewayConfig(prompts_max=3), "M", 100, context_len=64, hidden_len=4)


def score(**fields: Any) -> Wish:
    body = {"query": "q", "items": [" a", " b"], "label_token_ids": [4, 7], **fields}
    return read_score(msgspec.json.encode(body), LIMITS, lambda: 7, 9.0)


def rerank(**fields: Any) -> Wish:
    body = {"query": "q", "documents": ["a", "b"], **fields}
    return read_rerank(msgspec.json.encode(body), LIMITS, lambda: 7, 9.0)


def test_a_prompt_is_the_query_with_an_item() -> None:
    call = score().call
    assert [prompt.text for prompt in call.prompts] == ["q a", "q b"]
    assert call.sampling.label_ids == (4, 7) and call.sampling.max_tokens == 1
    assert not call.sampling.want_vector
    assert [prompt.text for prompt in score(item_first=True).call.prompts] == [" aq", " bq"]
    assert [prompt.text for prompt in score(items="x").call.prompts] == ["qx"]


def test_ids_are_joined_as_they_are() -> None:
    call = score(query=[1, 2], items=[[3], [], [4, 5]]).call
    ids = [unpack(prompt.ids or b"").tolist() for prompt in call.prompts]
    assert ids == [[1, 2, 3], [1, 2], [1, 2, 4, 5]]
    call = score(query=[1, 2], items=[[3]], item_first=True).call
    assert unpack(call.prompts[0].ids or b"").tolist() == [3, 1, 2]


WRONG_SCORES: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "model"),
    ({"items": []}, "items"),
    ({"items": ["a"] * 4}, "items"),
    ({"items": [[1]]}, "items"),
    ({"query": [1], "items": ["a"]}, "items"),
    ({"query": [1], "items": [1, 2]}, "items[0]"),
    ({"query": [100], "items": [[1]]}, "query"),
    ({"query": [1], "items": [[1], [-1]]}, "items[1]"),
    ({"query": "", "items": ["a", ""]}, "items"),
    ({"query": None}, "query"),
    ({"label_token_ids": []}, "label_token_ids"),
    ({"label_token_ids": None}, "label_token_ids"),
    ({"label_token_ids": [100]}, "label_token_ids"),
    ({"label_token_ids": [1] * 1025}, "label_token_ids"),
    ({"apply_softmax": 1}, "apply_softmax"),
    ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_SCORES)
def test_what_is_wrong_with_a_score_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        score(**fields)
    assert refused.value.problem.param == param


WRONG_RANKINGS: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "model"),
    ({"model": ""}, "model"),
    ({"query": ""}, "query"),
    ({"query": 5}, "query"),
    ({"documents": []}, "documents"),
    ({"documents": ["a"] * 4}, "documents"),
    ({"documents": ["a", 5]}, "documents[1]"),
    ({"documents": [{"image": "a"}]}, "documents[0].text"),
    ({"top_n": 0}, "top_n"),
    ({"top_n": 1.5}, "top_n"),
    ({"lora_path": "x"}, "lora_path"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_RANKINGS)
def test_what_is_wrong_with_a_ranking_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(Refused) as refused:
        rerank(**fields)
    problem = refused.value.problem
    assert problem.fault in (Fault.INVALID, Fault.NOT_FOUND)
    assert problem.param == param


@given(JSON | st.dictionaries(st.sampled_from(["query", "items", "documents", "top_n"]), JSON))
def test_any_body_is_read_or_refused(value: Any) -> None:
    for reader in (read_score, read_rerank):
        try:
            reader(msgspec.json.encode(value), LIMITS, lambda: 7, 9.0)
        except Refused:
            pass


@given(st.lists(st.floats(-9999.0, 0.0), min_size=1, max_size=8))
def test_probabilities_are_some(logprobs: list[float]) -> None:
    alone = probabilities(logprobs, among_them=False)
    assert all(0.0 <= value <= 1.0 for value in alone)
    among = probabilities(logprobs, among_them=True)
    assert math.fsum(among) == pytest.approx(1.0)
    order = sorted(range(len(logprobs)), key=logprobs.__getitem__)
    assert [among[i] for i in order] == sorted(among)


def test_a_ranking_asks_about_each_document() -> None:
    call = rerank(documents=["cats", {"text": "dogs"}], instruct="Be about pets.").call
    assert call.label_words == ("yes", "no") and call.param == "documents"
    asked = []
    for prompt in call.prompts:
        assert prompt.chat is not None
        turns = msgspec.json.decode(prompt.chat.messages_json)
        assert [turn["role"] for turn in turns] == ["system", "user"]
        asked.append(turns[1]["content"])
    assert all("Be about pets." in text and "q" in text for text in asked)
    assert "cats" in asked[0] and "dogs" in asked[1]


# The whole way


async def ask(street: Street, path: str, **fields: Any) -> Any:
    return await street.ask(street.request("POST", path, fields))


async def test_a_client_gets_a_number_for_each_item_and_label() -> None:
    street = Street()
    wish = {"query": "who is", "items": [" one", " two three"], "label_token_ids": [4, 7, 4]}
    bare = (await ask(street, "/v1/score", **wish)).json()
    assert bare["object"] == "scoring" and bare["model"] == "M"
    assert bare["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [len(row) for row in bare["scores"]] == [3, 3]
    for row in bare["scores"]:
        assert all(0.0 < value < 1.0 for value in row) and row[0] == row[2]
    shared = (await ask(street, "/score", **wish, apply_softmax=True)).json()
    for row, plain in zip(shared["scores"], bare["scores"], strict=True):
        assert row == pytest.approx([value / sum(plain) for value in plain])
    street.assert_idle()


async def test_the_best_document_comes_first_in_each_dialect() -> None:
    street = Street()
    documents = ["one", "two three", "four"]
    native = (await ask(street, "/v1/rerank", query="q", documents=documents)).json()
    assert [row["document"] for row in native] == [documents[row["index"]] for row in native]
    scores = [row["score"] for row in native]
    assert scores == sorted(scores, reverse=True) and all(0.0 < score < 1.0 for score in scores)
    assert all(row["meta_info"]["prompt_tokens"] > 0 for row in native)
    for path in ("/rerank", "/v2/rerank"):
        answer = (await ask(street, path, query="q", documents=documents, top_n=2)).json()
        assert answer["model"] == "M" and answer["id"].startswith("rerank-")
        assert answer["usage"]["total_tokens"] > 0
        assert answer["results"] == [
            {
                "index": row["index"],
                "relevance_score": row["score"],
                "document": {"text": row["document"]},
            }
            for row in native[:2]
        ]
    street.assert_idle()


async def test_documents_are_left_out_where_nobody_wants_them() -> None:
    street = Street()
    wish = {"query": "q", "documents": ["one"], "return_documents": False}
    assert (await ask(street, "/v1/rerank", **wish)).json()[0]["document"] is None
    assert "document" not in (await ask(street, "/rerank", **wish)).json()["results"][0]
