"""This file scores texts by what the model would say next: SGLang's /v1/score over given tokens,
and rankings of documents, which ask the model for a yes or no about each.

It does not know HTTP or vocabularies: the tokenizer finds the tokens of the two words. What a
ranking asks is `rerank_chat`, rendered by the model's own template without its thinking.
Laws: whatever the bytes, the result is a `Wish` or `Refused`; the refusal names the field; scores
are functions of the model and the texts alone.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actors.gateway.call import Prompt
from actors.gateway.dialect import Dialect
from actors.gateway.errors import invalid
from actors.gateway.inputs import Limits, check_count, check_ids, check_model, decode
from actors.gateway.readings import VectorWriter, Wish, check_lacking, names, reading, wish_of
from actors.gateway.sse import encode
from messages.tokenizer import Chat
from messages.types import pack
from messages.vectors import (
    Document,
    Ranked,
    RerankBody,
    RerankReply,
    Result,
    ScoreBody,
    ScoreReply,
)

Draw = Callable[[], int]
WORDS = ("yes", "no")
JUDGE = "You judge search results. Answer only yes or no: does the document meet the instruction?"
INSTRUCT = "The document answers the query."


def read_score(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Wish:
    """POST /v1/score. Raises Refused: the client's fault."""
    given = decode(body, _score_decoder)
    check_model(given.model, limits)
    check_lacking(given)
    check_ids(given.label_token_ids, "label_token_ids", limits)
    items: Sequence[Any] = [given.items] if isinstance(given.items, str) else given.items
    if not items:
        raise invalid("`items` cannot be an empty list.", "items")
    check_count(len(items), "items", limits)
    kind = type(given.query)
    if any(type(item) is not kind for item in items):
        raise invalid("`query` and `items` must be texts, or lists of token ids.", "items")
    if isinstance(given.query, list):
        check_ids(given.query, "query", limits)
        for index, item in enumerate(items):
            check_ids(item, f"items[{index}]", limits)
    pairs: list[tuple[Any, Any]] = [
        (item, given.query) if given.item_first else (given.query, item) for item in items
    ]
    joined = [first + second for first, second in pairs]
    if not all(joined):
        raise invalid(f"`items[{joined.index(kind())}]` and `query` are empty.", "items")
    prompts = [
        Prompt(text=prompt) if isinstance(prompt, str) else Prompt(ids=pack(prompt))
        for prompt in joined
    ]
    return wish_of(given, prompts, "items", sampling=reading(label_ids=given.label_token_ids))


def probabilities(logprobs: Sequence[float], *, among_them: bool) -> list[float]:
    """Of tokens by their log probabilities; `among_them`: as if there were no others."""
    if not among_them:
        return [math.exp(value) for value in logprobs]
    peak = max(logprobs)
    weights = [math.exp(value - peak) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class ScoreWriter(VectorWriter):
    def write(self, vectors: list[array[float]]) -> bytes:
        given: ScoreBody = self.wish.given
        softmax = bool(given.apply_softmax)
        scores = [probabilities(vector, among_them=softmax) for vector in vectors]
        return encode(ScoreReply(scores=scores, model=self.head.model, usage=self.usage()))


def read_rerank(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Wish:
    """POST /v1/rerank, /rerank and /v2/rerank. Raises Refused."""
    given = decode(body, _rerank_decoder)
    check_model(given.model, limits)
    check_lacking(given)
    check_count(len(given.documents), "documents", limits)
    instruct = given.instruct or INSTRUCT
    prompts = [
        Prompt(chat=rerank_chat(instruct, given.query, text_of(document), created_s))
        for document in given.documents
    ]
    return wish_of(given, prompts, "documents", sampling=reading(), label_words=WORDS)


def rerank_chat(instruct: str, query: str, document: str, created_s: float) -> Chat:
    """What is asked of one document. The fields are marked as rerankers made of language models
    have learned them."""
    asked = f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
    return Chat(
        messages_json=msgspec.json.encode(messages),
        template_kwargs_json=b'{"enable_thinking":false}',
        created_s=created_s,
    )


def text_of(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


class RankWriter(VectorWriter):
    """The best first; among equals the one that was named first."""

    def ranked(self, vectors: list[array[float]]) -> list[tuple[int, float]]:
        """Indices with their scores."""
        given: RerankBody = self.wish.given
        scores = [probabilities(vector, among_them=True)[0] for vector in vectors]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [(index, scores[index]) for index in order[: given.top_n]]

    def document(self, index: int) -> str | None:
        given: RerankBody = self.wish.given
        if given.return_documents is False:
            return None
        return text_of(given.documents[index])


class RerankWriter(RankWriter):
    """SGLang's answer."""

    def write(self, vectors: list[array[float]]) -> bytes:
        return encode(
            [
                Ranked(
                    score=score,
                    document=self.document(index),
                    index=index,
                    meta_info={
                        "id": self.head.id,
                        "prompt_tokens": self.usages[index].prompt_tokens,
                        "cached_tokens": self.usages[index].cached_tokens,
                    },
                )
                for index, score in self.ranked(vectors)
            ]
        )


class ResultsWriter(RankWriter):
    """Jina's and Cohere's answer."""

    def write(self, vectors: list[array[float]]) -> bytes:
        results = []
        for index, score in self.ranked(vectors):
            text = self.document(index)
            document = None if text is None else Document(text=text)
            results.append(Result(index=index, relevance_score=score, document=document))
        reply = RerankReply(
            id=self.head.id, model=self.head.model, results=results, usage=self.usage()
        )
        return encode(reply)


_score_decoder = msgspec.json.Decoder(ScoreBody)
_rerank_decoder = msgspec.json.Decoder(RerankBody)

DIALECTS = (
    Dialect("/v1/score", "score-", read_score, ScoreWriter, names=names),
    Dialect("/score", "score-", read_score, ScoreWriter, names=names),
    Dialect("/v1/rerank", "rerank-", read_rerank, RerankWriter, names=names),
    Dialect("/rerank", "rerank-", read_rerank, ResultsWriter, names=names),
    Dialect("/v2/rerank", "rerank-", read_rerank, ResultsWriter, names=names),
)
