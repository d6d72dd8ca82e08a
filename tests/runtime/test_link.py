"""This file tests the link's state machine: both ends, joined by a wire that loses at will."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.runtime.frame import Ack, Bye, Data, Hello, Identity, Stage
from actors.runtime.link import Arrived, Event, Gone, Limits, Link, Outgoing, Up
from messages.base import Address, Header
from messages.system import Cause, Reason

LIMITS = Limits(count_max=8, bytes_max=2000, ack_every=3, stall_s=10.0)


def identity(node: str, incarnation: int = 1, **changes: object) -> Identity:
    fields: dict[str, object] = {"run": "r", "token": b"secret", "schema": b"s", **changes}
    return Identity(node=node, incarnation=incarnation, **fields)  # type: ignore[arg-type]


def header(number: int, deadline_s: float | None = None) -> Header:
    return Header(Address("b", "x", 1), question=number, deadline_s=deadline_s)


class End:
    """A link with what its owner saw."""

    def __init__(self, me: Identity, peer: str, peer_incarnation: int, session: int, now_s: float):
        self.link = Link(me, peer, peer_incarnation, session=session, now_s=now_s, limits=LIMITS)
        self.arrived: list[Arrived] = []
        self.events: list[Event] = []

    def take(self, events: tuple[Event, ...]) -> None:
        for event in events:
            (self.arrived if isinstance(event, Arrived) else self.events).append(event)  # type: ignore[arg-type]
        self.link.check()

    @property
    def numbers(self) -> list[int | None]:
        return [event.header.question for event in self.arrived]


class Pair:
    """Two ends and the frames between them; every frame passes through both."""

    def __init__(self, a: End, b: End) -> None:
        self.a, self.b = a, b
        self.now_s = 0.0
        self.wires: dict[str, deque[Outgoing]] = {"ab": deque(), "ba": deque()}

    def pump(self) -> None:
        """All that both ends have to say goes onto the wires."""
        for end, wire in ((self.a, "ab"), (self.b, "ba")):
            while (outgoing := end.link.poll(self.now_s)) is not None:
                self.wires[wire].append(outgoing)
                end.link.check()

    def carry(self, wire: str) -> Outgoing:
        """The oldest frame of a wire arrives."""
        frame, body = outgoing = self.wires[wire].popleft()
        end = self.b if wire == "ab" else self.a
        end.take(end.link.receive(frame, body, self.now_s))
        return outgoing

    def settle(self) -> None:
        """Until nobody has anything to say."""
        for _ in range(10_000):
            self.pump()
            if not any(self.wires.values()):
                return
            for wire in self.wires:
                if self.wires[wire]:
                    self.carry(wire)
        raise AssertionError("the ends never fall silent")

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for end in (self.a, self.b):
            end.take(end.link.tick(self.now_s))


def pair(**changes: object) -> Pair:
    return Pair(End(identity("a"), "b", 1, 1, 0.0), End(identity("b", **changes), "a", 1, 1, 0.0))


def joined() -> Pair:
    both = pair()
    both.settle()
    assert both.a.link.is_up and both.b.link.is_up
    return both


def test_both_ends_agree_and_fall_silent() -> None:
    both = joined()
    assert both.a.events == [Up()]
    assert both.b.events == [Up()]


def test_nothing_is_sent_before_the_hello() -> None:
    both = pair()
    assert not both.a.link.send(header(1), b"", 0.0)
    both.settle()
    assert both.a.link.send(header(1), b"", 0.0)


def test_an_end_that_has_heard_is_not_up_until_it_was_heard() -> None:
    both = pair()
    both.pump()
    both.carry("ba")
    assert both.a.link.stage is Stage.HEARD and both.a.events == []
    assert not both.a.link.send(header(1), b"", 0.0)


def test_what_is_left_of_an_earlier_session_changes_nothing() -> None:
    end = End(identity("a"), "b", 1, 1, 0.0)
    hello = Hello(1, b"s", "r", b"secret", "b", 1, 5, 1, heard_session=1, stage=Stage.HEARD)
    end.take(end.link.receive(hello, None, 0.0))
    assert end.link.is_up and end.link.peer_session == 5
    earlier = Hello(1, b"s", "r", b"secret", "b", 1, 4, 1, heard_session=1, stage=Stage.HEARD)
    end.take(end.link.receive(earlier, None, 0.0))
    end.take(end.link.receive(Bye(4), None, 0.0))
    assert end.link.is_up and end.link.peer_session == 5
    assert end.link.counts.stale == 2
    end.take(end.link.receive(Bye(5), None, 0.0))
    assert not end.link.is_up


def test_a_lost_last_hello_does_not_hinder_the_data() -> None:
    both = pair()
    both.pump()
    both.carry("ab")
    both.carry("ba")
    both.pump()
    both.carry("ab")  # b agrees
    both.pump()
    both.wires["ba"].clear()  # what told a so is lost
    assert both.b.link.is_up and not both.a.link.is_up
    assert both.b.link.send(header(7), b"x", 0.0)
    both.settle()
    assert both.a.numbers == [7]


def test_messages_arrive_in_order_with_their_bodies() -> None:
    both = joined()
    for number in range(5):
        assert both.a.link.send(header(number), b"%d" % number, 0.0)
    both.settle()
    assert both.b.numbers == [0, 1, 2, 3, 4]
    assert [event.body for event in both.b.arrived] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_deadline_travels_as_what_is_left_of_it() -> None:
    both = joined()
    both.now_s = 100.0
    both.a.link.send(header(1, deadline_s=103.0), b"", both.now_s)
    both.pump()
    frame, _ = both.wires["ab"][0]
    assert isinstance(frame, Data) and frame.header.deadline_s == 3.0
    both.now_s = 5.0  # the receiver's clock is another one
    both.carry("ab")
    assert both.b.arrived[0].header.deadline_s == 8.0


def test_a_full_window_refuses_by_count() -> None:
    both = joined()
    sent = [both.a.link.send(header(n), b"", 0.0) for n in range(LIMITS.count_max + 1)]
    assert sent == [True] * LIMITS.count_max + [False]
    assert both.a.link.counts.full == 1


def test_a_full_window_refuses_by_bytes() -> None:
    both = joined()
    assert both.a.link.send(header(1), bytes(1500), 0.0)
    assert not both.a.link.send(header(2), bytes(500), 0.0)
    both.settle()  # 1500 of 2000 bytes are acknowledged at once, not on the timer
    assert both.a.link.send(header(3), bytes(500), 0.0)


def test_acks_come_every_few_messages_or_on_the_timer() -> None:
    both = joined()
    for number in range(4):
        both.a.link.send(header(number), b"", 0.0)
    both.settle()
    assert both.a.link.window_count == 1  # ack_every is 3
    assert both.b.link.wake_s() == pytest.approx(LIMITS.ack_s)
    both.advance(LIMITS.ack_s)
    both.settle()
    assert both.a.link.window_count == 0


def test_an_idle_link_wants_no_wake() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.settle()
    both.advance(LIMITS.ack_s)
    both.settle()
    assert both.a.link.wake_s() is None
    assert both.b.link.wake_s() is None


def test_a_gap_makes_the_sender_go_back() -> None:
    both = joined()
    for number in range(4):
        both.a.link.send(header(number), b"", 0.0)
    both.pump()
    del both.wires["ab"][1]
    both.settle()
    assert both.b.numbers == [0, 1, 2, 3]
    assert both.b.link.counts.gap == 1
    assert both.a.link.counts.resent == 3


def test_a_lost_tail_is_found_by_a_probe() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.pump()
    both.wires["ab"].clear()
    both.advance(LIMITS.probe_s)
    both.settle()
    assert both.b.numbers == [1]


def test_a_slow_peer_is_probed_but_nothing_is_sent_twice() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.pump()
    both.advance(LIMITS.probe_s)  # the frame is still on the wire
    both.settle()
    assert both.b.numbers == [1]
    assert both.a.link.counts.resent == 0


def test_what_is_sent_after_a_probe_is_not_taken_for_lost_by_its_answer() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.pump()
    both.advance(LIMITS.probe_s)
    both.pump()
    both.a.link.send(header(2), b"", both.now_s)
    both.settle()
    assert both.b.numbers == [1, 2]
    assert both.a.link.counts.resent == 0


def test_duplicates_are_dropped() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.pump()
    both.wires["ab"].append(both.wires["ab"][0])
    both.settle()
    assert both.b.numbers == [1]
    assert both.b.link.counts.duplicate == 1
    assert both.a.link.window_count == 0  # told at once that it has arrived


def test_who_stood_still_asks_before_a_link_is_lost() -> None:
    both = joined()
    assert both.a.link.send(header(1), b"", both.now_s)
    both.pump()
    both.advance(1000 * LIMITS.stall_s)  # with the answer perhaps unread
    assert both.a.events == [Up()]
    both.settle()
    both.advance(LIMITS.stall_s)
    both.settle()
    assert both.b.numbers == [1] and both.a.link.window_count == 0
    assert both.a.events == both.b.events == [Up()]


def test_a_peer_that_never_answers_is_lost_in_the_end() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    for _ in range(20):
        both.pump()
        both.wires["ab"].clear()
        both.advance(1.0)
    (_, gone) = both.a.events
    assert isinstance(gone, Gone) and gone.reason.cause is Cause.UNREACHABLE
    assert both.a.link.counts.lost == 1
    assert both.a.link.window_count == 0


def test_a_fresh_pipe_says_hello_first_and_sends_again() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.pump()
    both.wires["ab"].clear()
    both.a.link.fresh_pipe()
    both.pump()
    kinds = [type(frame) for frame, _ in both.wires["ab"]]
    assert kinds == [Hello, Data]
    both.settle()
    assert both.b.numbers == [1]


def test_close_tells_the_peer() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.a.link.close(Reason(cause=Cause.UNREACHABLE, detail="enough"))
    both.settle()
    assert both.b.events[-1] == Gone(Reason(cause=Cause.UNREACHABLE, detail="enough"))
    assert both.b.arrived == []  # it was in the window


def test_a_wrong_token_is_refused_and_changes_nothing() -> None:
    both = pair(token=b"guess")
    for _ in range(5):
        both.settle()
        both.advance(1.0)
    assert both.a.events == [] and both.b.events == []
    assert both.a.link.stage is Stage.CALLING
    assert both.a.link.counts.refused >= 5


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"schema": b"other"}, "version"), ({"run": "other"}, "another run")],
)
def test_a_peer_that_cannot_be_talked_to_ends_the_link(
    changes: dict[str, object], complaint: str
) -> None:
    both = pair(**changes)
    both.settle()
    for end in (both.a, both.b):
        (gone,) = end.events
        assert isinstance(gone, Gone)
    assert complaint in both.a.events[0].reason.detail  # type: ignore[union-attr]


def test_a_hello_for_an_earlier_life_is_refused() -> None:
    both = Pair(End(identity("a"), "b", 1, 1, 0.0), End(identity("b", 2), "a", 1, 1, 0.0))
    both.settle()
    assert not both.a.link.is_up and not both.b.link.is_up
    assert both.b.link.counts.stale >= 1  # meant for b#1
    assert both.a.link.counts.stale >= 1  # from b#2


def test_frames_before_the_hello_are_dropped() -> None:
    end = End(identity("b"), "a", 1, 1, 0.0)
    for frame in (Data(1, 0, header(1)), Ack(5), Bye(1)):
        end.take(end.link.receive(frame, b"", 0.0))
    assert end.arrived == [] and end.events == []
    assert end.link.counts.early == 3


def test_an_ack_of_more_than_was_sent_is_ignored() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.pump()
    both.a.take(both.a.link.receive(Ack(99), None, 0.0))
    assert both.a.link.window_count == 1


def test_when_one_end_starts_afresh_the_other_does_too() -> None:
    both = joined()
    both.a.link.send(header(1), b"", 0.0)
    both.settle()
    both.b.link.send(header(50), b"", 0.0)  # in b's window when a is gone
    both.a = End(identity("a"), "b", 1, 2, 0.0)
    both.settle()
    gone = both.b.events[-1]
    assert isinstance(gone, Gone) and gone.afresh
    both.b = End(identity("b"), "a", 1, 2, 0.0)
    both.settle()
    assert both.a.link.is_up and both.b.link.is_up
    both.a.link.send(header(2), b"", 0.0)
    both.b.link.send(header(3), b"", 0.0)
    both.settle()
    assert both.b.numbers == [2] and both.a.numbers == [3]


class LossyWire(RuleBasedStateMachine):
    """Against the dullest model: lists of what was accepted for sending, for each pair of lives.

    The wire loses, repeats and swaps frames. Nodes are restarted with a new incarnation, and links
    with a new session; frames of earlier ones stay on the wire.
    """

    @initialize()
    def start(self) -> None:
        self.incarnations = {"a": 1, "b": 1}
        self.sessions = {"a": 1, "b": 1}
        self.number = 0
        self.sent: dict[str, list[int]] = {"a": [], "b": []}  # since the present link began
        self.pair = Pair(self.new_end("a", 0.0), self.new_end("b", 0.0))
        # Who the frames on the wire are from: a socket tells that, so the link need not.
        self.known = {"a": 1, "b": 1}  # which life of it the other one links to

    def new_end(self, node: str, now_s: float) -> End:
        peer = "b" if node == "a" else "a"
        me = identity(node, self.incarnations[node])
        self.sent[node] = []
        return End(me, peer, self.incarnations[peer], self.sessions[node], now_s)

    def end(self, node: str) -> End:
        return self.pair.a if node == "a" else self.pair.b

    def renew(self, node: str) -> None:
        self.sessions[node] += 1
        end = self.new_end(node, self.pair.now_s)
        if node == "a":
            self.pair.a = end
        else:
            self.pair.b = end

    def after(self) -> None:
        """An owner whose link ended because the other began afresh makes a new one."""
        for node in ("a", "b"):
            for event in self.end(node).events:
                if isinstance(event, Gone):
                    self.renew(node)
                    break
        self.pair.pump()

    @rule(node=st.sampled_from("ab"), size=st.integers(0, 300))
    def send(self, node: str, size: int) -> None:
        self.number += 1
        if self.end(node).link.send(header(self.number), bytes(size), self.pair.now_s):
            self.sent[node].append(self.number)
        self.pair.pump()

    @rule(wire=st.sampled_from(["ab", "ba"]), count=st.integers(1, 6))
    def carry(self, wire: str, count: int) -> None:
        for _ in range(min(count, len(self.pair.wires[wire]))):
            self.pair.carry(wire)
            self.after()

    @rule(wire=st.sampled_from(["ab", "ba"]), index=st.integers(0, 20))
    def lose(self, wire: str, index: int) -> None:
        if index < len(self.pair.wires[wire]):
            del self.pair.wires[wire][index]

    @rule(wire=st.sampled_from(["ab", "ba"]), index=st.integers(0, 20))
    def repeat(self, wire: str, index: int) -> None:
        if index < len(self.pair.wires[wire]):
            self.pair.wires[wire].append(self.pair.wires[wire][index])

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2, 1.0]))
    def advance(self, seconds: float) -> None:
        self.pair.advance(seconds)
        self.after()

    @rule(node=st.sampled_from("ab"))
    def fresh_pipe(self, node: str) -> None:
        self.end(node).link.fresh_pipe()
        self.pair.pump()

    @rule(node=st.sampled_from("ab"))
    def restart_link(self, node: str) -> None:
        # A new pipe comes with it, and what was in the old one is told apart by its routing id.
        self.pair.wires["ab" if node == "a" else "ba"].clear()
        self.renew(node)
        self.pair.pump()

    @rule(node=st.sampled_from("ab"))
    def restart_node(self, node: str) -> None:
        """A new life: both make new links. Hellos of the old ones are still on their way."""
        self.incarnations[node] += 1
        for wire in self.pair.wires.values():
            hellos = [outgoing for outgoing in wire if isinstance(outgoing[0], Hello)]
            wire.clear()
            wire.extend(hellos)
        self.renew("a")
        self.renew("b")
        self.pair.pump()

    @precondition(lambda self: self.number)
    @rule()
    def heal(self) -> None:
        """Without loss, everything that was accepted arrives, and then both are silent."""
        for _ in range(12):
            self.pair.advance(1.0)
            self.after()
            for _ in range(200):
                self.pair.pump()
                if not any(self.pair.wires.values()):
                    break
                for wire in ("ab", "ba"):
                    if self.pair.wires[wire]:
                        self.pair.carry(wire)
                        self.after()
        assert self.pair.a.link.is_up and self.pair.b.link.is_up
        for sender, receiver in (("a", "b"), ("b", "a")):
            assert self.end(receiver).numbers == self.sent[sender]
            assert self.end(sender).link.window_count == 0
            assert self.end(sender).link.wake_s() is None

    @invariant()
    def what_arrives_is_a_prefix_of_what_was_sent(self) -> None:
        for sender, receiver in (("a", "b"), ("b", "a")):
            numbers = self.end(receiver).numbers
            assert numbers == self.sent[sender][: len(numbers)] or not self.current(receiver)

    def current(self, receiver: str) -> bool:
        """Whether the receiver's link belongs to the sender's present one."""
        other = "b" if receiver == "a" else "a"
        return self.end(receiver).link.peer_session == self.sessions[other]


LossyWire.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestLossyWire = LossyWire.TestCase
