"""Whole deployments under seeds, with faults: see `bench/sim/`. A failure prints what replays it.

Here are a few seeds, and those that have found a bug. `.ci/run` simulates 12 hours of 200 seeds by
`python -m app simulate`, which runs as many as there is time for; `-m nightly` is for a long night.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.gateway.actor import Gateway
from bench.sim.calling import said_in
from bench.sim.draws import Age, draw
from bench.sim.judge import NEWS_S, POISON_WORD, Judge, news_since
from bench.sim.oracle import Oracle, oracle_of
from bench.sim.scenario import (
    CHOICE_WAYS,
    FORM_NAMES,
    GRAMMARS,
    LONG_GRAMMARS,
    PEACE_S,
    PLEASE,
    Again,
    Ask,
    Drain,
    Leap,
    Menu,
)
from bench.sim.shadow import ShadowWorker
from bench.sim.sights import COUNTED, FAULTS, SOMETIMES
from bench.sim.text import VOCAB_SIZE, make_model
from bench.sim.widen import fits
from bench.sim.world import Broken, Result, run_world
from bench.simulate import main
from messages.system import Cause, Reason
from messages.types import Grammar, Sampling, pack, unpack
from messages.worker import Row, Step

ROOT = Path(__file__).resolve().parents[2]
WORLD_S = 240.0
SEEDS = 2
# Each was the first to show a bug, at this many simulated seconds.
FOUND = {
    5: 120.0,  # a front that starts while the worker is down crashed until the root gave up
    7: 120.0,  # a step sent before the link was up was lost, and nobody tried again
    19: 120.0,  # the end of a stream, refused by a full detokenizer, was lost
    24: 120.0,  # tokens for a detokenizer that the scheduler's node did not know yet were lost
    34: 120.0,  # who died while its siblings were being started got two lives
}
# The same of worlds of the next age.
FOUND_SINCE = {
    107: 360.0,  # streams were kept for clients by a gateway that had ended
    110: 360.0,  # who ran beside a lone suspect became one, and the guilty was never alone
    111: 360.0,  # who came back to a stream got log probabilities twice
    20_057: 360.0,  # who had stood still himself cut readers who could not read meanwhile
    20_577: 360.0,  # a gateway that was restarted in a drain took new work
    20_417: 360.0,  # what a dead scheduler had said came after the news, and was kept for ever
    20_494: 360.0,  # a root that had stood still with all others took a node for hung
}
# The same of worlds of today's age.
FOUND_WIDE = {
    112_171: 360.0,  # a call cut off was told as text again to who came back to other pieces
    104_069: 360.0,  # who came back between a row's text and its end got its last tokens twice
    106_184: 360.0,  # the same, where they came one by one
    412_010: 360.0,  # a request of a batch's file waited for ever for threads that had ended
    417_000: 360.0,  # whose constraint waited for its turn was told that it is too complex
    1_034_046: 450.0,  # a drain waited for who had died just before, whose next life took work
    1_016_074: 450.0,  # a gateway's timers went on in a stopped process, and cut who could not read
    1_015_005: 450.0,  # who wrote to a slow reader slept on when the connection was cut
    1_008_073: 450.0,  # whose constraint the wire had lost was told that it is too complex
    3_010_163: 450.0,  # who had just come was told that its constraint had waited too long
}
# And where the seed orders the callbacks too.
FOUND_SHUFFLED = {
    40_045: 360.0,  # what a scheduler ended, as it took a gateway for dead, was a line's result
    2_004_114: 450.0,  # the root gave up in peace, of kills just before and of poison: by right
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("worlds"))


def hours(seconds: float) -> str:
    return repr(seconds / 3600)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_world_keeps_its_laws(seed: int, model: Path) -> None:
    run_world(draw(seed, WORLD_S), model)


@pytest.mark.parametrize("seed", FOUND)
def test_a_world_that_found_a_bug_stays_whole(seed: int, model: Path) -> None:
    run_world(draw(seed, FOUND[seed], age=Age.FIRST), model)


@pytest.mark.parametrize("seed", FOUND_SINCE)
def test_a_world_that_found_a_bug_since_stays_whole(seed: int, model: Path) -> None:
    run_world(draw(seed, FOUND_SINCE[seed], age=Age.RICH), model)


@pytest.mark.parametrize("seed", FOUND_WIDE)
def test_a_world_that_found_a_bug_of_late_stays_whole(seed: int, model: Path) -> None:
    run_world(draw(seed, FOUND_WIDE[seed], age=Age.WIDE), model)


@pytest.mark.parametrize("seed", FOUND_SHUFFLED)
def test_a_world_that_found_a_bug_in_another_order_stays_whole(seed: int, model: Path) -> None:
    run_world(draw(seed, FOUND_SHUFFLED[seed], shuffles=True, age=Age.WIDE), model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 10_003))
def test_a_world_keeps_its_laws_in_any_order_of_callbacks(seed: int, model: Path) -> None:
    run_world(draw(seed, WORLD_S, shuffles=True), model)


@pytest.mark.nightly
@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("seed", range(20_000, 20_500))
def test_a_world_of_the_night_keeps_its_laws(seed: int, shuffles: bool, model: Path) -> None:
    run_world(draw(seed, 600.0, shuffles=shuffles), model)


def test_a_world_is_the_same_in_every_process() -> None:
    command = [sys.executable, "-m", "app", "simulate", "--seeds", "2", "--first-seed", "62"]
    command += ["--hours", hours(120.0), "--jobs", "1", "--chains", "--shuffle"]
    chains = []
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        chains.append([line for line in ran.stdout.splitlines() if " chain " in line])
    assert len(chains[0]) == 2
    assert chains[0] == chains[1]


@pytest.mark.parametrize("seed", range(300, 306))
def test_a_request_that_the_worker_dies_of_fails_alone(seed: int, model: Path) -> None:
    """However many others are in flight with it, and are thrown back by its deaths."""
    drawn = draw(seed, 60.0, age=Age.FIRST)
    shape = drawn.shape._replace(
        restarts_max=5, queued_max=64, mailbox_max=0, launch_s=0.05, placement="engine"
    )
    poison = 511
    others = tuple(
        ask._replace(at_s=5.0 + i / 100, reader="plain", namespace="", max_tokens=30)
        for i, ask in enumerate(drawn.asks[:24])
        if ask.prompt[0] != poison
    )
    guilty = others[0]._replace(name="guilty", at_s=5.1, prompt=(poison, 5, 6), stop_ids=())
    peace = Menu(gap_s=1e9, weights={"kill": 1.0}, drop=0.0, repeat=0.0)
    result = run_world(
        drawn._replace(shape=shape, asks=(*others, guilty), menu=peace, poison=poison), model
    )
    assert result.refused == {"repeatedly_interrupted": 1}
    assert result.whole_count == len(others)
    assert not result.gave_up


def test_news_is_old_where_a_gateway_could_not_hear_it() -> None:
    assert news_since(100.0, []) == 100.0 - NEWS_S
    assert news_since(100.0, [(10.0, 20.0), (96.0, 96.0)]) == 100.0 - NEWS_S
    # One trouble after the other, in whatever order they are told; what was on its way before has
    # as long to come as without them, and no longer.
    assert news_since(100.0, [(60.0, 80.0), (79.0, 99.0), (10.0, 20.0)]) == 60.0 - (NEWS_S - 1.0)
    assert news_since(100.0, [(60.0, 99.5), (50.0, 59.0), (10.0, 48.0)]) == 50.0 - (NEWS_S - 1.5)
    assert news_since(100.0, [(60.0, 200.0), (110.0, 120.0)]) == 60.0 - NEWS_S


@pytest.mark.parametrize(
    ("at_s", "deaths", "fault"),
    [
        (70.0, [(69.0, Cause.CRASHED, "a law")], None),  # it was no peace yet
        (101.0, [(98.0, Cause.EXITED, "killed"), (100.9, Cause.CRASHED, POISON_WORD)], None),
        (108.0, [(108.0, Cause.HUNG, "no heartbeat for 8 s")], None),  # had hung before
        (200.0, [(199.5, Cause.CRASHED, POISON_WORD), (199.9, Cause.STOPPED, "")], None),
        (200.0, [(90.0, Cause.EXITED, "killed"), (199.9, Cause.STOPPED, "")], "110 s after"),
        (200.0, [(190.0, Cause.HUNG, "no beat"), (200.0, Cause.CRASHED, POISON_WORD)], "no beat"),
    ],
)
def test_a_house_gives_up_in_peace_only_of_what_was_before_or_of_poison(
    at_s: float, deaths: list[tuple[float, Cause, str]], fault: str | None
) -> None:
    world = SimpleNamespace(
        injector=SimpleNamespace(peace_s=100.0),
        scenario=SimpleNamespace(shape=draw(1, 60.0).shape._replace(hang_s=8.0)),
        deaths=[(when, "replica/worker", Reason(cause, said)) for when, cause, said in deaths],
    )
    expected = contextlib.nullcontext() if fault is None else pytest.raises(AssertionError)
    with expected as caught:
        Judge(world).giving_up(at_s)
    assert fault is None or fault in str(caught.value)


def test_a_wall_clock_that_is_put_forward_and_back_changes_nothing(model: Path) -> None:
    drawn = draw(28, 60.0, age=Age.RICH)

    def native(ask: Ask) -> Ask:
        is_one = ask.reader in ("plain", "http") and not ask.namespace
        if not is_one or not fits(ask.grammar, "http native"):
            return ask
        return ask._replace(reader="http native", choice_count=1)

    asks = tuple(map(native, drawn.asks))
    assert sum(ask.reader == "http native" for ask in asks) > 3
    leaps = tuple(Leap(nth / 8, 3600.0 * (-1) ** nth) for nth in range(480))
    still, leapt = (run_world(drawn._replace(asks=asks, leaps=each), model) for each in ((), leaps))
    clock = {"the wall clock was put forward": 240, "the wall clock was put back": 240}
    assert still.whole_count > 3
    assert leapt.fired == still.fired + Counter(clock)
    # The chain is of bytes, and what was asked in a chat says when.
    assert leapt._replace(fired=still.fired, chain=still.chain) == still


def test_who_comes_back_to_an_answer_in_other_pieces_gets_each_token_once(model: Path) -> None:
    """Text, log probabilities and usage, where another gateway has it made again."""
    drawn = draw(28, 20.0, age=Age.RICH)
    ask = drawn.asks[0]._replace(
        reader="http returns", grammar=LONG_GRAMMARS[0], logprobs=True, max_tokens=60, pause_s=0.5,
        ignore_eos=False, stop_ids=(), meets="", text="", choice_count=1, namespace="",
    )  # fmt: skip
    asks = tuple(
        ask._replace(name=f"c{i}", at_s=float(i), prompt=(5, 6, 7 + i), after=(2, 8, 11, 14)[i % 4])
        for i in range(16)
    )
    shape = drawn.shape._replace(
        placement="two fronts", page_size=16, kv_tokens=640, queued_max=64, mailbox_max=0,
        step_s=0.2, resume_s=1.0, jumps_vary=True,
    )  # fmt: skip
    peace = Menu(gap_s=1e9, weights={"kill": 1.0}, drop=0.0, repeat=0.0)
    result = run_world(
        drawn._replace(shape=shape, asks=asks, menu=peace, drain=None, poison=None, spoils=False),
        model,
    )
    assert result.whole_count == len(asks)
    assert result.seen["came back to another gateway"] > 4
    assert result.seen["came back to other pieces than it had"] > 2


@pytest.mark.parametrize(
    ("seed", "duration_s"),
    [*((seed, 360.0) for seed in range(102, 113)), (1_010_140, 450.0), (3_404_368, 450.0)],
)
def test_a_device_is_asked_for_no_more_than_it_computes_in_peace(
    seed: int, duration_s: float
) -> None:
    """So that who has no end by then is stuck, however little faults have let be done before. The
    last two once asked for more: a step's way to the worker takes half as long as the step, and a
    page is so large that few prompts fit at once."""
    scenario = draw(seed, duration_s)
    shape = scenario.shape
    page_count = shape.kv_tokens // shape.page_size
    step_count = 0.0
    for line in (line for ask in scenario.asks for line in ask.lines or (ask,)):
        is_read = not line.reader.endswith(("leaves", "hasty"))
        token_count = line.max_tokens if is_read else 1
        share = max(
            math.ceil(len(line.prompt) / shape.page_size) / page_count, 1 / shape.running_max
        )
        prompt_steps = len(line.prompt) / shape.prefill_budget
        step_count += line.choice_count * (prompt_steps + token_count * share)
    round_s = shape.step_s + 2 * shape.delay_s
    assert 0.0 < step_count * max(shape.step_s, round_s / shape.credits) <= PEACE_S


def test_worlds_differ_and_their_faults_happen(model: Path) -> None:
    results: list[Result] = [run_world(draw(seed, 60.0), model) for seed in range(200, 204)]
    assert len({result.chain for result in results}) == len(results)
    kinds = {kind for result in results for kind, count in result.fired.items() if count}
    assert len(kinds & set(FAULTS)) >= 6
    assert sum(result.check_count for result in results) > 1000


def test_a_summary_counts_what_fired_and_names_what_never_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--seeds", "2", "--first-seed", "7", "--hours", hours(120.0), "--jobs", "1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["failed"] == []
    assert found["simulated_h"] >= 120.0 / 3600
    assert found["requests"] > 0
    assert set(found["never_fired"]).isdisjoint(found["fired"])
    assert set(found["never_fired"]) | set(found["fired"]) >= set(COUNTED)
    assert set(found["never_seen"]) | set(found["seen"]) >= set(SOMETIMES)


def test_a_run_that_has_not_seen_all_is_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seeds", "1", "--first-seed", "7", "--hours", hours(20.0), "--jobs", "1"]
    assert main(arguments) == 0
    assert main([*arguments, "--complete"]) == 1
    assert "NEVER" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["task", "timer"])
def test_what_goes_on_after_the_stop_is_found(
    kind: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_stop = Gateway.on_stop

    async def stop(gateway: Gateway, reason: Reason) -> None:
        await on_stop(gateway, reason)
        if kind == "timer":
            asyncio.get_running_loop().call_later(1e6, stray)
        else:
            strays.append(asyncio.create_task(asyncio.sleep(1e6), name="stray"))

    strays: list[asyncio.Task[None]] = []
    monkeypatch.setattr(Gateway, "on_stop", stop)
    drawn = draw(3, 20.0)
    peace = Menu(gap_s=1e9, weights={"kill": 1.0}, drop=0.0, repeat=0.0)
    with pytest.raises(Broken, match="stray.* go on after the stop"):
        run_world(drawn._replace(menu=peace, drain=None, poison=None, spoils=False), model)


def stray() -> None:
    """A callback of a timer that nobody has stopped."""


def test_the_shadow_says_what_the_oracle_says_of_each_kind_of_ask(model: Path) -> None:
    """The plain function against the worker's own state, also where that is rebuilt midway."""
    oracle = oracle_of(str(model))
    ask = (
        draw(1, 60.0)
        .asks[0]
        ._replace(
            prompt=(5, 6, 7), max_tokens=12, stop_ids=(), ignore_eos=False, namespace="", seed=1
        )
    )
    kinds = [ask._replace(penalised=True), *(ask._replace(grammar=one) for one in GRAMMARS)]
    for each in kinds:
        right = oracle.tokens(each, 0)
        for emitted in range(len(right)):
            found = gone_on_with(oracle, each, right[:emitted])
            assert found == right[emitted : emitted + len(found)]


@pytest.mark.parametrize("form", FORM_NAMES)
def test_a_model_that_may_call_does_and_does_not(form: str, model: Path) -> None:
    """Its shadow says what its oracle says, wherever it is gone on from; strict calls fit."""
    oracle = oracle_of(str(model))
    plain = draw(1, 60.0).asks[0]._replace(
        stop_ids=(), stop="", meets="", ignore_eos=False, namespace="", max_tokens=120,
        text=PLEASE, form=form, reader="http", choice_count=1, penalised=False,
    )  # fmt: skip
    kinds: Counter[str] = Counter()
    for way in CHOICE_WAYS:
        for seed in range(12):
            ask = oracle.with_prompt(plain._replace(tools=way, seed=seed))
            right = oracle.right(ask, 0)
            said = said_in(ask, right)
            kinds["calls"] += bool(said.calls)
            kinds["texts"] += not said.calls
            kinds["whole calls"] += bool(said.calls) and right.matched is not None
            kinds["several calls"] += len(said.calls) > 1
            emitted = len(right.tokens) * seed // 12
            if seed % 4 == 0:
                found = gone_on_with(oracle, ask, right.tokens[:emitted])
                assert found == right.tokens[emitted : emitted + len(found)]
    assert kinds["calls"] > 5 and kinds["texts"] > 5 and kinds["whole calls"] > 2, kinds


def gone_on_with(oracle: Oracle, ask: Ask, emitted: list[int]) -> list[int]:
    """What a shadow says next that is given so much of an answer."""
    shadow = ShadowWorker(
        page_count=64,
        page_size=4,
        vocab_size=VOCAB_SIZE,
        constrainer=oracle.constrainer(),
        habit=oracle.habit(ask.form),
    )
    tokens = [*ask.prompt, *emitted]
    row = Row(
        slot=0,
        request="r",
        tokens=pack(tokens),
        prompt_len=len(ask.prompt),
        cached_len=0,
        pages=pack(range(64)),
        sampling=Sampling(seed=ask.seed, frequency_penalty=0.5 if ask.penalised else 0.0),
        grammar=Grammar(*ask.grammar) if ask.grammar else None,
    )
    step = Step(epoch=1, step=1, slots=pack([0]), counts=pack([len(tokens)]), opened=(row,))
    done = shadow.execute(step)
    return [*unpack(done.tokens), *unpack(done.jumped_tokens)]


@pytest.mark.parametrize(("placement", "again"), [("serve", "serve"), ("two fronts", "serve")])
def test_a_batch_that_a_drain_interrupts_goes_on_in_the_next_run(
    placement: str, again: str, model: Path
) -> None:
    drawn = draw(28, 20.0, age=Age.RICH)
    line = drawn.asks[0]._replace(
        reader="http line", max_tokens=60, ignore_eos=True, stop_ids=(), meets="", text="",
        choice_count=1, namespace="", stop="", grammar=(), logprobs=False, wants="",
    )  # fmt: skip
    lines = tuple(line._replace(name=f"n{i}", prompt=(5, 6, 7 + i)) for i in range(8))
    batch = line._replace(name="b", at_s=0.0, reader="http batch", lines=lines, after=2)
    batches = [batch._replace(name=f"b{front}", front=front) for front in range(4)]
    shape = drawn.shape._replace(
        placement=placement, running_max=4, queued_max=64, mailbox_max=0, step_s=0.05, batches=True,
    )  # fmt: skip
    drain = Drain(
        asks=tuple(batches),
        after_s=6.0,
        grace_s=20.0,
        again=Again(again, (batch._replace(name="later"),)),
    )
    peace = Menu(gap_s=1e9, weights={"kill": 1.0}, drop=0.0, repeat=0.0)
    result = run_world(
        drawn._replace(
            shape=shape,
            asks=(line._replace(reader="plain"),),
            menu=peace,
            drain=drain,
            poison=None,
            spoils=False,
        ),  # fmt: skip
        model,
    )
    seen = result.seen
    assert seen["a batch went on in the next run"] + seen["a batch came to its end"] > 4
    assert seen["a batch went on in the next run"] > 0
    is_other = placement != again
    assert seen["a batch of a front end that was no more went on"] == is_other


def test_a_failing_seed_is_shown_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = ShadowWorker._read  # a worker that does not see the first token
    monkeypatch.setattr(ShadowWorker, "_read", lambda self, tenant: read(self, tenant)[1:])
    code = main(["--seeds", "1", "--first-seed", "3", "--hours", hours(60.0), "--jobs", "1"])
    said = capsys.readouterr().out
    assert code == 1
    assert "seed 3 FAILED" in said
    assert f"python -m app simulate --seeds 1 --first-seed 3 --hours {hours(60.0)}" in said
    assert "last events:" in said
