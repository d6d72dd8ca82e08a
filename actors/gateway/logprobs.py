"""This file shapes log probabilities as the OpenAI dialect has them, for both routes.

It does not know chunks or streams. A token's text is its bytes decoded; where they are only part
of a character, the chat route shows replacement characters beside the exact `bytes`, and the
completions route, which has no bytes, shows `bytes:\\x..`, since its maps need distinct keys.
Law: nothing that leaves here is infinite or NaN; what is impossible is `FLOOR`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from messages.gateway import TokenLogprob
from messages.openai import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from messages.openai import TokenLogprob as ChatTokenLogprob

FLOOR = -9999.0


def finite(logprob: float) -> float:
    # Written so that NaN, which no comparison holds for, becomes the floor too.
    return logprob if logprob > FLOOR else FLOOR


def chat_logprobs(rows: Iterable[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=row.token.decode("utf-8", "replace"),
                logprob=finite(row.logprob),
                bytes=list(row.token),
                top_logprobs=[
                    TopLogprob(
                        token=token.decode("utf-8", "replace"),
                        logprob=finite(logprob),
                        bytes=list(token),
                    )
                    for token, _, logprob in row.best
                ],
            )
            for row in rows
        ]
    )


class CompletionScribe:
    """One choice's lists, with offsets that go on from chunk to chunk.

    `text_offset[i]` counts the characters that the tokens before i complete, after `start`
    characters of echoed prompt.
    """

    def __init__(self, alternatives: int, start: int = 0) -> None:
        self.alternatives = alternatives
        self.offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, rows: Iterable[TokenLogprob], *, is_prompt: bool = False) -> CompletionLogprobs:
        """With `is_prompt` nothing comes before the first row: its values are null."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        best: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for row in rows:
            name = name_of(row.token)
            tokens.append(name)
            logprobs.append(finite(row.logprob))
            offsets.append(self.offset)
            self.offset += len(self._decoder.decode(row.token))
            if self.alternatives:
                alternatives = {name_of(token): finite(lp) for token, _, lp in row.best}
                alternatives.setdefault(name, finite(row.logprob))
                best.append(alternatives)
        if is_prompt and tokens:
            logprobs[0] = None
            best[:1] = [None] * len(best[:1])
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=logprobs,
            top_logprobs=best if self.alternatives else None,
            text_offset=offsets,
        )


def prompt_logprobs(rows: Iterable[TokenLogprob]) -> PromptLogprobs:
    """vLLM's form: the alternatives and the token itself, by id."""
    result: PromptLogprobs = []
    for row in rows:
        found = {
            str(token_id): PromptLogprob(
                logprob=finite(logprob), rank=rank, decoded_token=token.decode("utf-8", "replace")
            )
            for rank, (token, token_id, logprob) in enumerate(row.best, 1)
        }
        own = PromptLogprob(
            logprob=finite(row.logprob),
            rank=None,
            decoded_token=row.token.decode("utf-8", "replace"),
        )
        found.setdefault(str(row.token_id), own)
        result.append(found if result else None)
    return result


def name_of(token: bytes) -> str:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
