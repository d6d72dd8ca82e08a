"""This file counts what an answer has used, for its usage and for what chunks say of it.

It does not know how answers are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from actors.gateway.call import Checked
from actors.gateway.openai import Ask
from actors.gateway.thoughts import Thoughts
from messages.gateway import Delta
from messages.openai import CompletionDetails, PromptDetails, Usage
from messages.types import Usage as RequestUsage
from messages.types import unpack


class Tally:
    """The usage of a call: each prompt once, however many choices it has."""

    def __init__(self, ask: Ask) -> None:
        self.choice_count = ask.call.choice_count
        self.is_chat = ask.is_chat
        self.thoughts_parser = ask.shape.thoughts_parser
        self.thoughts: dict[int, Thoughts] = {}  # by choice
        self.prompts: dict[int, RequestUsage] = {}
        self.completion_tokens = 0

    def prompt(self, index: int, usage: RequestUsage | None) -> None:
        """What is known of the choice's prompt."""
        if usage is not None:
            self.prompts.setdefault(index // self.choice_count, usage)

    def think(self, index: int, delta: Delta) -> None:
        """Counts the tokens of reasoning; of every delta of a choice, in order."""
        if not self.thoughts_parser:
            return
        thoughts = self.thoughts.get(index)
        if thoughts is None:
            thoughts = self.thoughts[index] = Thoughts(self.thoughts_parser)
        thoughts.see(delta)

    def finish(self, index: int, usage: RequestUsage | None) -> None:
        """Counts one finished choice."""
        usage = usage or RequestUsage()
        self.completion_tokens += usage.completion_tokens
        self.prompts.setdefault(index // self.choice_count, usage)

    def check_only(self, checked: Iterable[Checked]) -> None:
        """Counts prompts that nothing was generated for."""
        for index, prompt in enumerate(checked):
            self.prompts[index] = RequestUsage(prompt_tokens=prompt.token_count)

    def usage(self) -> Usage:
        """Of the whole call."""
        thoughts = sum(thoughts.count for thoughts in self.thoughts.values())
        return self._usage(self.prompts.values(), self.completion_tokens, thoughts)

    def usage_of(self, index: int, completion_tokens: int) -> Usage:
        """Of one choice that has so many tokens."""
        prompt = self.prompts.get(index // self.choice_count, RequestUsage())
        thoughts = self.thoughts.get(index)
        return self._usage([prompt], completion_tokens, 0 if thoughts is None else thoughts.count)

    def _usage(
        self, prompts: Iterable[RequestUsage], completion_tokens: int, reasoning_tokens: int
    ) -> Usage:
        usages = list(prompts)
        prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        details = CompletionDetails(reasoning_tokens=reasoning_tokens)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptDetails(
                cached_tokens=sum(usage.cached_tokens for usage in usages)
            ),
            completion_tokens_details=details if self.is_chat else msgspec.UNSET,
        )


class Extras:
    """What a stream's chunks have beside text, where it was asked for: ids of tokens, usage so far
    of the chunk's choice.

    Every chunk is then encoded by itself; templates are for streams without.
    """

    def __init__(self, ask: Ask, tally: Tally, checked: Sequence[Checked]) -> None:
        self.ask = ask
        self.tally = tally
        self.checked = checked
        self.is_on = ask.live_usage or ask.token_ids
        self._ids: list[int] | None = None
        self._fresh: set[int] = set()
        self._counts: dict[int, int] = {}  # tokens that have come, by choice

    def open(self, index: int, delta: Delta) -> None:
        """Before the choice's first chunk, which has none of the delta's tokens."""
        if self.ask.live_usage:
            self.tally.prompt(index, delta.usage)

    def see(self, index: int, delta: Delta) -> None:
        if self.ask.live_usage:
            self._counts[index] = self._counts.get(index, 0) + delta.token_count
        if self.ask.token_ids and delta.token_ids:
            self._ids = list(unpack(delta.token_ids))

    def ids(self) -> list[int] | msgspec.UnsetType:
        """The ids that the next chunk stands for: each goes with one chunk."""
        if not self.ask.token_ids:
            return msgspec.UNSET
        ids, self._ids = self._ids, None
        return ids or []

    def begin(self, index: int) -> None:
        """The choice's next chunk is its first with something in it."""
        if self.ask.token_ids:
            self._fresh.add(index)

    def prompt_ids(self, index: int) -> list[int] | msgspec.UnsetType:
        """For the first chunk of a choice."""
        if index not in self._fresh:
            return msgspec.UNSET
        self._fresh.discard(index)
        return list(unpack(self.checked[index // self.ask.call.choice_count].ids))

    def usage(self, index: int) -> Usage | None | msgspec.UnsetType:
        if self.ask.live_usage:
            return self.tally.usage_of(index, self._counts.get(index, 0))
        return None if self.ask.include_usage else msgspec.UNSET
