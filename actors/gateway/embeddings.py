"""This file turns texts and token ids into embeddings: OpenAI's route and Ollama's two.

It does not know HTTP or models. An embedding may be cut only where the model's config says that its
beginning is one as well (Matryoshka); what is cut is scaled to length 1 again.
Laws: whatever the bytes, the result is a `Wish`, `Ready` or `Refused`; the refusal names the field.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Sequence

import msgspec

from actors.gateway.call import Call, Prompt
from actors.gateway.dialect import Dialect, Ready
from actors.gateway.errors import invalid
from actors.gateway.inputs import Limits, check_count, check_model, decode, read_inputs
from actors.gateway.ollama import named
from actors.gateway.readings import VectorWriter, Wish, check_lacking, names, reading, wish_of
from actors.gateway.sse import encode
from messages.ollama import EmbedBody, EmbeddingsBody, EmbeddingsReply, EmbedReply
from messages.types import pack_floats
from messages.vectors import Embedding, EmbeddingBody, EmbeddingReply

Draw = Callable[[], int]


def read_embeddings(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Wish:
    """POST /v1/embeddings. Raises Refused: the client's fault."""
    given = decode(body, _decoder)
    check_model(given.model, limits)
    check_lacking(given)
    check_dimensions(given.dimensions, limits)
    length = given.truncate_prompt_tokens
    if length == 0:
        raise invalid(
            "`truncate_prompt_tokens` must be at least 1, or -1.", "truncate_prompt_tokens"
        )
    return wish_of(
        given,
        read_inputs(given.input, "input", limits),
        "input",
        sampling=reading(want_vector=True),
        add_special=given.add_special_tokens is not False,
        truncate_len=None if length is None else max(length, 0),
    )


def check_dimensions(dimensions: int | None, limits: Limits) -> None:
    if dimensions is None or dimensions == limits.hidden_len:
        return
    lens = limits.vector_lens
    if lens is None:
        raise invalid(
            f"The embeddings of this model have {limits.hidden_len} dimensions, and its config "
            "does not say that they may be cut.",
            "dimensions",
        )
    if dimensions > limits.hidden_len or (lens and dimensions not in lens):
        known = ", ".join(map(str, lens)) if lens else f"1 to {limits.hidden_len}"
        raise invalid(f"`dimensions` can be {known} with this model.", "dimensions")


def cut(vector: array[float], dimensions: int | None) -> array[float]:
    """Its beginning, of length 1 like the whole."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    head = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in head))
    return array("f", [value / length for value in head]) if length else head


class EmbeddingWriter(VectorWriter):
    def one(self, index: int, vector: array[float]) -> msgspec.Raw:
        given: EmbeddingBody = self.wish.given
        vector = cut(vector, given.dimensions)
        shown = to_text(vector) if given.encoding_format == "base64" else vector.tolist()
        return msgspec.Raw(encode(Embedding(index=index, embedding=shown)))

    def write(self, found: list[msgspec.Raw]) -> bytes:
        return encode(EmbeddingReply(data=found, model=self.head.model, usage=self.usage()))  # type: ignore[arg-type]


def to_text(vector: array[float]) -> str:
    return base64.b64encode(pack_floats(vector)).decode()


# Ollama


def read_embed(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Wish:
    """POST /api/embed. Raises Refused; Ready."""
    given = decode(body, _embed_decoder)
    model = named(given.model, limits)
    check_dimensions(given.dimensions, limits)
    texts = [given.input] if isinstance(given.input, str) else given.input or []
    if texts in ([], [""]):
        raise Ready(encode(EmbedReply(model=model, embeddings=[])))
    check_count(len(texts), "input", limits)
    return ollama_wish(given, texts, "input", None if given.truncate is False else 0)


def read_old_embeddings(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Wish:
    """POST /api/embeddings. Raises Refused; Ready."""
    given = decode(body, _old_decoder)
    named(given.model, limits)
    if not given.prompt:
        raise Ready(encode(EmbeddingsReply(embedding=[])))
    return ollama_wish(given, [given.prompt], "prompt", 0)


def ollama_wish(
    given: EmbedBody | EmbeddingsBody, texts: Sequence[str], param: str, truncate_len: int | None
) -> Wish:
    call = Call(
        prompts=tuple(Prompt(text=text) for text in texts),
        sampling=reading(want_vector=True),
        truncate_len=truncate_len,
        param=param,
    )
    return Wish(call, given)


class EmbedWriter(VectorWriter):
    def one(self, index: int, vector: array[float]) -> msgspec.Raw:
        given: EmbedBody = self.wish.given
        return msgspec.Raw(encode(cut(vector, given.dimensions).tolist()))

    def write(self, found: list[msgspec.Raw]) -> bytes:
        return encode(
            EmbedReply(
                model=self.head.model,
                embeddings=found,  # type: ignore[arg-type]
                total_duration=max(0, round((self.head.now_s() - self.head.begun_s) * 1e9)),
                load_duration=0,
                prompt_eval_count=self.usage().prompt_tokens,
            )
        )


class OldEmbeddingsWriter(VectorWriter):
    def write(self, vectors: list[array[float]]) -> bytes:
        return encode(EmbeddingsReply(embedding=vectors[0].tolist()))


_decoder = msgspec.json.Decoder(EmbeddingBody)
_embed_decoder = msgspec.json.Decoder(EmbedBody)
_old_decoder = msgspec.json.Decoder(EmbeddingsBody)

DIALECTS = (
    Dialect("/v1/embeddings", "embd-", read_embeddings, EmbeddingWriter, names=names),
    Dialect("/api/embed", "", read_embed, EmbedWriter),
    Dialect("/api/embeddings", "", read_old_embeddings, OldEmbeddingsWriter),
)
