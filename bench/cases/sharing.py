"""This file has the cases of what requests share: the pool, the prefix cache, the batch, the queue.

Compared are texts of the same request under different company; that is exact in float32.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from bench.cases.asking import (
    COMPLETION,
    FLUSH_S,
    Peer,
    Reply,
    Skipped,
    at_once,
    each_at_once,
    expect,
    same,
)
from bench.cases.table import case

PAGE, POOL = 16, 512  # of the settings "small"
SMALL_S = 20.0


def ids(rng: random.Random, peer: Peer, length: int) -> list[int]:
    return [rng.randrange(20, peer.vocab_size) for _ in range(length)]


@case("B125", "request that fits validation but never admission", settings="small")
def near_capacity(peer: Peer) -> None:
    rng = random.Random(125)
    for length in range(POOL - 2 * PAGE, POOL + 1, 5):
        reply = peer.comp(ids(rng, peer, length), max_tokens=1)
        if reply.status != 200:
            reply.expect_refused()
        tiny = peer.comp("x", max_tokens=1)
        tiny.expect_ok()
        expect(tiny.seconds < SMALL_S, f"behind {length} tokens one waited {tiny.seconds:.1f} s")


@case("B127", "bigger than the pool, smaller than the context", settings="small")
def over_pool(peer: Peer) -> None:
    rng = random.Random(127)
    reply = peer.comp(ids(rng, peer, 1000), max_tokens=1)
    error = reply.expect_refused()
    expect(str(POOL) in error["message"], f"the pool is not named: {error['message']}")
    long = peer.comp(ids(rng, peer, 400), max_tokens=1000, ignore_eos=True)
    if long.status == 200:
        expect(long.finish == "length", long.finish)
    else:
        long.expect_refused(400, 503)
    peer.comp("x", max_tokens=1).expect_ok()


@case("B129", "decode goes on beside prefill")
def decode_beside_prefill(peer: Peer) -> None:
    rng = random.Random(129)
    long = ids(rng, peer, min((peer.context_len or 4096) - 100, 3000))
    times: list[float] = []
    began = threading.Event()

    def flow() -> None:
        began.wait(60)
        times.append(time.monotonic())
        peer.comp(long, max_tokens=1).expect_ok()
        times.append(time.monotonic())

    def stream() -> list[float]:
        body = peer.comp_body("Once", max_tokens=300, ignore_eos=True)
        return peer.stream(COMPLETION, body, began).arrivals_s

    arrivals_s, _ = at_once(stream, flow)
    between = [at_s for at_s in arrivals_s if times[0] < at_s < times[1]]
    # A token with each chunk; no server takes chunks of more than a third of this prompt.
    expect(len(between) >= 3, f"{len(between)} pieces while a prompt of {len(long)} ran")


@case("B131", "no slot stays empty", settings="small")
def all_slots(peer: Peer) -> None:
    rng = random.Random(131)
    most: list[float] = []
    done: list[float] = []

    def ask() -> None:
        peer.comp(ids(rng, peer, 40), max_tokens=60, ignore_eos=True).expect_ok()
        done.append(time.monotonic())

    def look() -> None:
        until_s = time.monotonic() + 60
        while not done and time.monotonic() < until_s:
            most.append(peer.busy()[0])
            time.sleep(0.05)

    at_once(look, *[ask] * 4)
    expect(max(most) == 4, f"{max(most):.0f} ran at once")


@case("B137", "same prompt twice at once")
def twice_at_once(peer: Peer) -> None:
    rng = random.Random(137)

    def ask(prompt: list[int]) -> str:
        return peer.comp(prompt, max_tokens=24, ignore_eos=True).text

    for turn in range(4):
        prompt = ids(rng, peer, 3 * PAGE + 1)
        other = ids(rng, peer, 50)

        first, second, _ = each_at_once(ask, (prompt, prompt, other))
        alone = peer.comp(prompt, max_tokens=24, ignore_eos=True, cache_salt=f"137-{turn}").text
        expect(first == second == alone, f"{first!r}, {second!r}, alone {alone!r}")


@case("B139", "whole prompt cached")
def all_cached(peer: Peer) -> None:
    rng = random.Random(139)
    for length in (PAGE, 2 * PAGE, 3 * PAGE, PAGE - 1, PAGE + 1, 2 * PAGE + 1):
        prompt = ids(rng, peer, length)
        replies = [peer.comp(prompt, max_tokens=4, ignore_eos=True) for _ in range(3)]
        expect(same([reply.text for reply in replies]), f"{length}: texts differ")
        expect(replies[-1].cached < length, f"{length}: {replies[-1].cached} cached")


@case("B141", "prompt shorter than a page")
def short_prompts(peer: Peer) -> None:
    rng = random.Random(141)
    for length in range(1, PAGE):
        prompt = ids(rng, peer, length)
        for _ in range(2):
            reply = peer.comp(prompt, max_tokens=1)
            expect(reply.cached == 0, f"{length} tokens, {reply.cached} cached")
    peer.expect_idle()


@case("B143", "the cache changes no text")
def cache_changes_nothing(peer: Peer) -> None:
    rng = random.Random(143)
    stem = ids(rng, peer, 5 * PAGE)
    prompts = [stem[: rng.randrange(0, 5 * PAGE)] + ids(rng, peer, 5) for _ in range(12)]
    cold = [
        peer.comp(prompt, max_tokens=12, ignore_eos=True, cache_salt=f"143-{i}").text
        for i, prompt in enumerate(prompts)
    ]
    hits = 0
    for _ in range(2):
        order = list(range(len(prompts)))
        rng.shuffle(order)
        for i in order:
            reply = peer.comp(prompts[i], max_tokens=12, ignore_eos=True)
            hits += reply.cached
            expect(reply.text == cold[i], f"warm {reply.text!r}, cold {cold[i]!r}")
    expect(hits > 0, "nothing was cached")


@case("B145", "retraction does not splice", settings="small")
def retraction(peer: Peer) -> None:
    rng = random.Random(145)
    for fields in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
        prompts = [ids(rng, peer, 30) for _ in range(4)]
        keywords: dict[str, Any] = {"max_tokens": 130, "ignore_eos": True, **fields}
        alone = [peer.comp(prompt, **keywords).text for prompt in prompts]
        keywords["stream_options"] = {"include_usage": True}
        before = peer.counted("histrio_retractions_total")
        streams = each_at_once(
            lambda prompt, keywords=keywords: peer.comp_stream(prompt, **keywords), prompts
        )
        for stream, text in zip(streams, alone, strict=True):
            expect(stream.text == text, f"{stream.text!r} is not {text!r}")
            expect(stream.usage["completion_tokens"] == 130, f"{stream.usage}")
        expect(peer.counted("histrio_retractions_total") > before, "nothing was retracted")


@case("B147", "preemption makes progress", settings="small")
def preemption(peer: Peer) -> None:
    rng = random.Random(147)
    before = peer.counted("histrio_retractions_total")
    long = ids(rng, peer, 400)
    short = [ids(rng, peer, 8) for _ in range(5)]
    replies = each_at_once(
        lambda one: peer.comp(one[0], max_tokens=one[1], ignore_eos=True),
        [(long, 60), *((each, 120) for each in short)],
    )
    for reply in replies:
        expect(reply.finish == "length", reply.finish)
    count = peer.counted("histrio_retractions_total") - before
    expect(count <= 30, f"{count:.0f} retractions for 6 requests")


@case("B151", "batch size changes no text")
def batch_size(peer: Peer) -> None:
    rng = random.Random(151)
    prompt = ids(rng, peer, 60)

    def ask(prompt: list[int]) -> str:
        return peer.comp(prompt, max_tokens=24, ignore_eos=True).text

    alone = ask(prompt)
    for count in (1, 7, 31):
        others = [ids(rng, peer, rng.randrange(5, 120)) for _ in range(count)]
        found = each_at_once(ask, [prompt, *others])
        expect(found[0] == alone, f"beside {count}: {found[0]!r}, alone {alone!r}")


@case("B155", "queue overflow", settings="queue")
def overflow(peer: Peer) -> None:
    def ask() -> Reply:
        return peer.comp("Once upon", max_tokens=20, ignore_eos=True)

    replies = at_once(*[ask] * 60)
    good = [reply for reply in replies if reply.status == 200]
    full = [reply for reply in replies if reply.status != 200]
    for reply in full:
        reply.expect_refused(429, 503)
        expect("retry-after" in reply.headers, "no Retry-After")
    expect(good and full, f"{len(good)} served, {len(full)} refused")
    peer.expect_idle()


@case("B161", "forged cache namespace")
def forged_salt(peer: Peer) -> None:
    rng = random.Random(161)
    prompt = ids(rng, peer, 4 * PAGE)
    for salt in (None, "x", "xy"):
        fields: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        cold = peer.comp(prompt, max_tokens=1, **fields).cached
        warm = peer.comp(prompt, max_tokens=1, **fields).cached
        expect(cold == 0 and warm > 0, f"salt {salt}: {cold} cached, then {warm}")
    for salt in ("salt:x", "base", "0", " "):
        found = peer.comp(prompt, max_tokens=1, cache_salt=salt).cached
        expect(found == 0, f"salt {salt!r} hits {found}")


@case("B179", "recompute is no cache hit", settings="small")
def recompute(peer: Peer) -> None:
    rng = random.Random(179)
    hits = peer.counted("histrio_cached_tokens_total")
    retracted = peer.metric("histrio_retractions_total")
    prompts = [ids(rng, peer, 30) for _ in range(6)]
    each_at_once(lambda p: peer.comp(p, max_tokens=130, ignore_eos=True), prompts)
    if peer.counted("histrio_retractions_total") == retracted:
        raise Skipped("nothing was retracted")
    found = peer.metric("histrio_cached_tokens_total") - hits
    expect(found == 0, f"{found:.0f} tokens count as hits")


@case("B177", "counts add up, with those who left")
def counts(peer: Peer) -> None:
    names = {
        "finished": "histrio_requests_total",
        "prompt": "histrio_prompt_tokens_total",
        "generated": "histrio_generated_tokens_total",
    }

    def total(outcome: str) -> float:
        return peer.metric(names["finished"], outcome=outcome)

    time.sleep(FLUSH_S)
    outcomes = ("length", "stop", "abort", "refused")
    before = {outcome: total(outcome) for outcome in outcomes}
    pages = peer.metric("histrio_pages")
    tokens = {name: peer.metric(names[name]) for name in ("prompt", "generated")}
    prompt_count = generated = 0
    for i in range(5):
        usage = peer.comp([300 + i] * 5, max_tokens=7, ignore_eos=True).usage
        prompt_count += usage["prompt_tokens"]
        generated += usage["completion_tokens"]
    for _ in range(2):
        peer.comp("x", temperature=-1).expect_refused()
    peer.expect_idle()
    expect(total("length") - before["length"] == 5, "5 have finished")
    expect(total("refused") - before["refused"] == 2, "2 were refused")
    found = {name: peer.metric(names[name]) - tokens[name] for name in tokens}
    wanted = {"prompt": prompt_count, "generated": generated}
    expect(found == wanted, f"counted {found}, told {wanted}")
    body = peer.comp_body("x", max_tokens=2000, ignore_eos=True, stream=True)
    for _ in range(5):
        with peer.opened(COMPLETION, body) as link:
            link.recv(64)
    peer.expect_idle()
    left = total("abort") - before["abort"]
    expect(left == 5, f"5 left, {left:.0f} were counted")
    expect(peer.metric("histrio_pages") == pages, "pages do not add up to the pool any more")
