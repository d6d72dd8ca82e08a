"""This file holds the public HTTP schemas of what is made of prompts without generating:
embeddings, scores, rankings.

It does not know how a body becomes a call (`actors/gateway/embeddings.py`, `scoring.py`); only the
gateway imports it. The rules are those of `messages/openai.py`. Embeddings are OpenAI's, scores and
/v1/rerank SGLang's, the other rankings Jina's and Cohere's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from messages.openai import NOT_GIVEN, Int32, Positive, Salt, TopK

Text = Annotated[str, msgspec.Meta(min_length=1)]


class VectorsUnsupported(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that peers have and we do not: anything but a neutral value is refused."""

    lora_path: msgspec.Raw = NOT_GIVEN
    embed_overrides: msgspec.Raw = NOT_GIVEN
    return_pooled_hidden_states: msgspec.Raw = NOT_GIVEN


class Inputs(VectorsUnsupported, kw_only=True, frozen=True):
    """What all of them have."""

    user: str | None = None  # taken, and not used
    priority: Int32 | None = None  # larger goes first
    rid: str | None = None  # by which `/abort_request` knows the call
    cache_salt: Salt | None = None  # prefixes are shared only among requests with the same


class EmbeddingBody(Inputs, kw_only=True, frozen=True):
    """POST /v1/embeddings. The final hidden state of the last token, scaled to length 1."""

    model: str
    input: str | list[str | int | list[int]]  # texts or token ids, one or a list of them
    encoding_format: Literal["float", "base64"] | None = None  # base64: of little-endian float32
    dimensions: Positive | None = None  # only with models whose config says that they may be cut
    truncate_prompt_tokens: TopK | None = None  # the last so many tokens; -1: what fits
    add_special_tokens: bool | None = None  # true where it is not given


class ScoreBody(Inputs, kw_only=True, frozen=True):
    """POST /v1/score. How likely each of some tokens is to follow the query with an item."""

    model: str | None = None
    query: str | list[int]
    items: str | list[str | list[int]]  # texts where the query is one, else lists of ids
    label_token_ids: Annotated[list[int], msgspec.Meta(min_length=1, max_length=1024)]
    apply_softmax: bool | None = None  # among the labels, so that they are 1 together
    item_first: bool | None = None  # the item goes before the query


class Document(msgspec.Struct, kw_only=True, frozen=True):
    text: str


class RerankBody(Inputs, kw_only=True, frozen=True):
    """POST /v1/rerank. How likely the model is to say yes, rather than no, when it is asked whether
    a document answers the query."""

    model: str | None = None
    query: Text
    documents: Annotated[list[str | Document], msgspec.Meta(min_length=1)]
    instruct: str | None = None  # what makes a document a good one
    top_n: Positive | None = None  # all where it is not given
    return_documents: bool | None = None  # true where it is not given


class PromptUsage(msgspec.Struct, kw_only=True, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True, frozen=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str  # text: base64 of little-endian float32


class EmbeddingReply(msgspec.Struct, kw_only=True, frozen=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


class ScoreReply(msgspec.Struct, kw_only=True, frozen=True):
    """For each item a number for each label."""

    object: str = "scoring"
    scores: list[list[float]]
    model: str
    usage: PromptUsage


class Ranked(msgspec.Struct, kw_only=True, frozen=True):
    """One of /v1/rerank, the best first."""

    score: float
    document: str | None
    index: int
    meta_info: dict[str, Any]


class Result(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankReply(msgspec.Struct, kw_only=True, frozen=True):
    """Of /rerank and /v2/rerank."""

    id: str
    model: str
    results: list[Result]
    usage: PromptUsage
