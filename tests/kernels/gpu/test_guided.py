"""Rows that the host has to look at, on a GPU: constrained ones, and prompts that are told of."""

from __future__ import annotations

import re
from collections import deque

import pytest
import torch

from kernels.batch import Constraint, Sampling, SlotOpen, StepInput
from kernels.constrain import TokenTable
from kernels.runner import Flight, Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import ints

pytestmark = pytest.mark.gpu
EOS = 0


def load(known: Answered, device: str) -> Runner:
    options = RunnerOptions(
        dtype="float32", device=device, kv_tokens=4096, slot_count=8, lazy_graphs=True
    )
    runner = Runner.load(known.path, options)
    runner.kv.forget()
    return runner


def opening(
    slot: int, prompt: list[int], sampling: Sampling, constraint: Constraint | None = None
) -> SlotOpen:
    pages = ints(range(4 * slot, 4 * slot + 4))
    return SlotOpen(slot, ints(prompt), len(prompt), 0, pages, sampling, constraint)


def test_constrained_rows_beside_free_ones(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    pytest.importorskip("llguidance")
    known = tiny_models["llama"]
    runner = load(known, "cuda")
    vocab_size = runner.facts.vocab_size
    pieces = [b"<end>", *(bytes([byte]) for byte in range(256))]
    pieces += [f"<t{i}>".encode() for i in range(vocab_size)]
    runner.use_vocabulary(TokenTable(pieces[:vocab_size], frozenset({EOS}), (EOS,), vocab_size))
    prompt = known.prompts[0]
    greedy = Sampling(temperature=0.0)
    opened = [
        opening(0, prompt, greedy),
        opening(1, prompt, greedy, Constraint("regex", "[a-f]{6}")),
    ]
    counts = ints([len(prompt)] * 2)
    output = runner.execute(StepInput(ints([0, 1]), counts, opened=opened))
    said = [[int(token)] for token in output.tokens]
    for _ in range(6):
        output = runner.execute(StepInput(ints([0, 1]), ints([1, 1])))
        for tokens, token in zip(said, output.tokens.tolist(), strict=True):
            tokens.append(token)
    assert said[0] == known.answers[0][:7]
    assert said[1][-1] == EOS
    assert re.fullmatch(b"[a-f]{6}", b"".join(pieces[token] for token in said[1][:-1]))
    # The constrained row leaves: the free one goes on by the device's own path.
    output = runner.execute(StepInput(ints([0]), ints([1]), closed=ints([1])))
    assert output.tokens.tolist() == known.answers[0][7:8]


PIECES = [b"<end>", *(bytes([byte]) for byte in range(256)), b"left", b"right", b" and "]
RULES = [
    None,
    Constraint("regex", "[a-f]{6}"),
    Constraint("choice", '["left and right", "left and left and left"]'),
    Constraint("regex", "(left|right|and){3}[0-9]left and right"),
]


def answers(
    known: Answered, device: str, samplings: list[Sampling], *, token_jump: bool, depth: int
) -> list[list[int]]:
    """Tokens of a row for each rule; as by a scheduler with `depth` steps in flight."""
    options = RunnerOptions(
        dtype="float32", device=device, kv_tokens=4096, slot_count=8, token_jump=token_jump
    )
    runner = Runner.load(known.path, options)
    runner.warm_up()
    vocab_size = runner.facts.vocab_size
    pieces = [*PIECES, *(f"<t{i}>".encode() for i in range(vocab_size))][:vocab_size]
    runner.use_vocabulary(TokenTable(pieces, frozenset({EOS}), (EOS,), vocab_size))
    prompt = known.prompts[0]
    opened = [
        opening(slot, prompt, sampling, rule)
        for slot, (sampling, rule) in enumerate(zip(samplings, RULES, strict=True))
    ]
    said: list[list[int]] = [[] for _ in RULES]
    planned = [0] * len(RULES)
    closed: list[int] = []
    going = list(range(len(RULES)))
    flights: deque[Flight] = deque()

    def land() -> None:
        output = flights.popleft().result()
        assert not len(output.failed)
        for slots, tokens in (
            (output.slots, output.tokens),
            (output.jumped_slots, output.jumped_tokens),
        ):
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                said[slot].append(token)
        for slot in [slot for slot in going if EOS in said[slot] or len(said[slot]) > 20]:
            going.remove(slot)
            closed.append(slot)

    while going:
        counts = [max(len(prompt) + len(said[slot]) - planned[slot], 1) for slot in going]
        for slot, count in zip(going, counts, strict=True):
            planned[slot] += count
        step = StepInput(ints(going), ints(counts), opened=opened, closed=ints(closed))
        opened, closed = [], []
        flights.append(runner.launch(step))
        if len(flights) >= depth:
            land()
    while flights:
        land()
    return [tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens[:20] for tokens in said]


@pytest.mark.parametrize("special", [False, True])
def test_constrained_rows_launched_ahead_say_what_they_say_one_by_one(
    cuda: torch.device, tiny_models: dict[str, Answered], special: bool
) -> None:
    """With tokens that are jumped over, and with rows that the host has to sample."""
    pytest.importorskip("llguidance")
    known = tiny_models["llama"]
    more = {"presence_penalty": 0.5, "logprobs": 2} if special else {}
    samplings = [Sampling(temperature=0.0, **more), *[Sampling(temperature=0.0)] * 3]
    plain = answers(known, "cpu", samplings, token_jump=False, depth=1)
    for jump in (False, True):
        for depth in (1, 2):
            assert answers(known, "cuda", samplings, token_jump=jump, depth=depth) == plain
    hot = [Sampling(temperature=1.0, seed=slot, **more) for slot in range(4)]
    one = answers(known, "cuda", hot, token_jump=False, depth=1)
    assert answers(known, "cuda", hot, token_jump=True, depth=2) == one
    for tokens in one[1:]:
        assert tokens[-1] == EOS


def test_prompts_are_told_of_as_on_a_cpu(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["llama"]
    prompt = (max(known.prompts, key=len) * 9)[:9]
    found = []
    for device in ("cpu", "cuda"):
        own = Sampling(temperature=0.0, prompt_logprobs=1)
        step = StepInput(ints([0]), ints([9]), opened=[opening(0, prompt, own)])
        (part,) = load(known, device).execute(step).prompts
        found.append([row.logprob for row in part.logprobs])
    assert found[1] == pytest.approx(found[0], abs=1e-3)
