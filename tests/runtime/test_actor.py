"""Goal: an actor that does not handle all that it accepts can't even be defined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from actors.runtime import Actor
from messages.base import Message


class Ping(Message, frozen=True):
    n: int


class StepDone(Message, frozen=True):
    n: int


class Tick(NamedTuple):
    n: int


def test_a_missing_handler_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="Deaf accepts StepDone but has no on_step_done"):

        class Deaf(Actor):
            accepts = Ping | StepDone

            def on_ping(self, message: Ping) -> None: ...


def test_a_handler_annotated_as_another_type_is_an_error() -> None:
    with pytest.raises(TypeError, match="on_ping must be annotated with Ping, not .*StepDone"):

        class Wrong(Actor):
            accepts = Ping

            def on_ping(self, message: StepDone) -> None: ...


def test_a_handler_without_annotation_is_an_error() -> None:
    with pytest.raises(TypeError, match="must be annotated with Ping"):

        class Bare(Actor):
            accepts = Ping

            def on_ping(self, message): ...  # type: ignore[no-untyped-def]


def test_a_handler_with_more_arguments_is_an_error() -> None:
    with pytest.raises(TypeError, match="must take"):

        class Greedy(Actor):
            accepts = Ping

            def on_ping(self, message: Ping, more: int) -> None: ...


def test_an_actor_without_accepts_is_an_error() -> None:
    with pytest.raises(TypeError, match="declares no `accepts`"):

        class Blank(Actor):
            pass


def test_an_unresolvable_annotation_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot resolve"):

        class Unknown(Actor):
            accepts = Ping

            def on_ping(self, message: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_what_is_no_message_is_not_accepted() -> None:
    with pytest.raises(TypeError, match="which is no Message"):

        class Loose(Actor):
            accepts = Tick

            def on_tick(self, message: Tick) -> None: ...


def test_private_messages_must_be_frozen() -> None:
    @dataclass
    class Soft:
        n: int

    with pytest.raises(TypeError, match="private Soft must be frozen"):

        class Keeper(Actor):
            accepts = Ping
            private = Soft

            def on_ping(self, message: Ping) -> None: ...
            def on_soft(self, message: Soft) -> None: ...


def test_handlers_may_be_plain_async_inherited_and_private() -> None:
    class Base(Actor, abstract=True):
        def on_ping(self, message: Ping) -> None: ...

    class Whole(Base):
        accepts = Ping | StepDone
        private = Tick

        async def on_step_done(self, message: StepDone) -> None: ...
        def on_tick(self, message: Tick) -> None: ...

    rows = {member.__name__: tuple(row) for member, row in Whole.handlers.items()}
    assert rows == {
        "Ping": ("on_ping", False, False),
        "StepDone": ("on_step_done", True, False),
        "Tick": ("on_tick", False, True),
    }


def test_two_messages_of_one_name_are_an_error() -> None:
    other = type("Ping", (Message,), {}, frozen=True)
    with pytest.raises(TypeError):

        class Twice(Actor):
            accepts = Ping | other

            def on_ping(self, message: Ping) -> None: ...
