"""This file has the cases of streams: characters, stop strings, chunks, usage, who leaves."""

from __future__ import annotations

import random
import socket
import threading
import time

from bench.cases.asking import (
    CHAT,
    COMPLETION,
    Peer,
    Skipped,
    each_at_once,
    expect,
)
from bench.cases.table import case

BROKEN = "\ufffd"
LIST = "Fruits:\n1. apple\n2. banana\n3."


@case("B001", "characters split over tokens")
def split_characters(peer: Peer) -> None:
    for seed in range(4):
        # Hot enough for any bytes to come out.
        wild = {"temperature": 1.6, "seed": seed, "max_tokens": 40, "ignore_eos": True}
        plain = peer.comp("猫 🦊👩‍🚀 naïve Ωmega 猫 🦊👩‍🚀", **wild)
        stream = peer.comp_stream("猫 🦊👩‍🚀 naïve Ωmega 猫 🦊👩‍🚀", **wild)
        expect(stream.text == plain.text, f"{stream.text!r} is not {plain.text!r}")
    copied = peer.comp_stream("🦊🦊🦊🦊🦊🦊🦊🦊", max_tokens=30)
    pieces = [choice["text"] for choice in copied.of(0)][:-2]
    expect(not any(BROKEN in piece for piece in pieces), f"half characters: {pieces}")


@case("B003", "limit inside a character")
def limit_inside(peer: Peer) -> None:
    for count in range(1, 13):
        plain = peer.comp("🦊🦊🦊🦊🦊🦊🦊🦊", max_tokens=count, ignore_eos=True)
        stream = peer.comp_stream("🦊🦊🦊🦊🦊🦊🦊🦊", max_tokens=count, ignore_eos=True)
        expect(plain.finish == "length", f"finish_reason {plain.finish}")
        expect(stream.text == plain.text, f"{count}: {stream.text!r} is not {plain.text!r}")
        expect(plain.text.count(BROKEN) <= 1, f"tail {plain.text!r}")


@case("B005", "no part of a stop string is streamed")
def stop_held_back(peer: Peer) -> None:
    whole = peer.chat("Say the alphabet", max_tokens=40).text
    for start in (4, 9, 14):
        stop = whole[start : start + 12]
        stream = peer.chat_stream("Say the alphabet", max_tokens=40, stop=[stop])
        expect(stream.text == whole[: whole.index(stop)], f"{stop!r}: {stream.text!r}")
        expect(stream.finishes == ["stop"], f"finish {stream.finishes}")


@case("B007", "stop string across token borders")
def stop_anywhere(peer: Peer) -> None:
    whole = peer.comp("1,2,3,", max_tokens=24).text
    for start in range(0, len(whole) - 2, 3):
        stop = whole[start : start + 2]
        reply = peer.comp("1,2,3,", max_tokens=24, stop=[stop])
        expect(reply.text == whole[: whole.index(stop)], f"{stop!r}: {reply.text!r}")
        expect(reply.finish == "stop", f"finish {reply.finish}")


@case("B009", "newlines before a stop string that does not come")
def newline_kept(peer: Peer) -> None:
    whole = peer.comp(LIST, max_tokens=40).text
    if "\n" not in whole:
        raise Skipped("the model wrote no newline")
    stream = peer.comp_stream(LIST, max_tokens=40, stop=["\n<ZZ>"])
    expect(stream.text == whole, f"{stream.text!r} is not {whole!r}")


@case("B011", "usage chunk only when asked for")
def usage_chunk(peer: Peer) -> None:
    for options in (None, {}, {"include_usage": False}):
        fields = {} if options is None else {"stream_options": options}
        stream = peer.chat_stream("hello", max_tokens=4, **fields)
        expect(not any(chunk.get("usage") for chunk in stream.chunks), f"usage with {options}")
    stream = peer.chat_stream("hello", max_tokens=4, stream_options={"include_usage": True})
    expect(stream.usage["completion_tokens"] > 0, "empty usage")
    expect(stream.chunks[-1]["choices"] == [], "the usage chunk is not the last, without choices")


@case("B013", "finish_reason when the model ends by itself")
def ends_by_itself(peer: Peer) -> None:
    bias = {str(peer.eos_id): 100}
    stream = peer.chat_stream("Reply with one word: yes", logit_bias=bias, max_tokens=20)
    expect(stream.finishes == ["stop"], f"finish {stream.finishes} ({stream.text!r})")
    natural = peer.chat_stream("Say: yes", max_tokens=200)
    expect(len(natural.finishes) == 1, f"finish {natural.finishes}")


@case("B015", "finish_reason key in every chunk")
def finish_key(peer: Peer) -> None:
    for choice in peer.chat_stream("hello", max_tokens=5).of(0):
        expect({"index", "delta", "finish_reason"} <= set(choice), f"keys {sorted(choice)}")


@case("B017", "role in the first chunk only")
def role_once(peer: Peer) -> None:
    ends = {"logit_bias": {str(peer.eos_id): 100}}
    for fields, count in (({}, 1), (ends, 1), ({"n": 2, "temperature": 1.0}, 2)):
        stream = peer.chat_stream("hello", max_tokens=5, **{"temperature": 0, **fields})
        for index in range(count):
            roles = [choice["delta"].get("role") for choice in stream.of(index)]
            expect(roles[:1] == ["assistant"] and not any(roles[1:]), f"roles {roles}")
            expect("" not in roles, 'role ""')


@case("B019", "bad requests are refused alike with stream")
def refused_alike(peer: Peer) -> None:
    long = "word " * (2 * (peer.context_len or 8192))
    bad = ({"temperature": -1}, {"max_tokens": "x"}, {"tool_choice": "required", "tools": []})
    for body in [peer.chat_body(long), *(peer.chat_body("x", **fields) for fields in bad)]:
        plain, stream = peer.post(CHAT, body), peer.post(CHAT, {**body, "stream": True})
        first, second = plain.expect_refused(), stream.expect_refused()
        expect(first["code"] == second["code"], f"codes {first['code']}, {second['code']}")


@case("B021", "sentinel and last newline")
def sentinel(peer: Peer) -> None:
    stream = peer.comp_stream("x", max_tokens=3, stream_options={"include_usage": True})
    raw = stream.reply.raw
    expect(raw.endswith(b"\n\ndata: [DONE]\n\n"), f"ends in {raw[-40:]!r}")


@case("B023", "plain client leaves")
def plain_leaves(peer: Peer) -> None:
    before = peer.counted("histrio_generated_tokens_total")
    body = peer.comp_body("x", max_tokens=(peer.context_len or 4000) - 100, ignore_eos=True)
    with peer.opened(COMPLETION, body):
        time.sleep(0.5)
    peer.expect_idle()
    made = peer.metric("histrio_generated_tokens_total") - before
    expect(made < body["max_tokens"] / 2, f"{made:.0f} tokens were made for nobody")


@case("B025", "client leaves before the first chunk")
def leaves_at_once(peer: Peer) -> None:
    body = peer.comp_body("x", max_tokens=200, ignore_eos=True, stream=True)
    for number in range(50):
        with peer.opened(COMPLETION, body) as link:
            if number % 2:
                link.shutdown(socket.SHUT_WR)
    peer.expect_idle()


@case("B027", "slow readers", slow=True)
def slow_readers(peer: Peer) -> None:
    ends = threading.Event()
    tokens = min(2000, (peer.context_len or 4000) - 100)
    body = peer.comp_body("x", max_tokens=tokens, ignore_eos=True, stream=True)

    def stall() -> None:
        with peer.opened(COMPLETION, body) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            while not ends.wait(1.0):
                try:
                    if not link.recv(1):
                        return
                except OSError:
                    return

    before = peer.resident_bytes()
    threads = [threading.Thread(target=stall, daemon=True) for _ in range(50)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            time.sleep(5)
            peer.comp("hello", max_tokens=20).expect_ok()
            grown = peer.resident_bytes() - before
            expect(grown < 100 << 20, f"{grown >> 20} MiB more")
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    peer.expect_idle()


@case("B029", "usage alike with and without stream")
def usage_alike(peer: Peer) -> None:
    whole = peer.chat("Count to ten", max_tokens=50).text
    for fields in ({"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 50}, {"stop": whole[5:9]}):
        keywords = {"max_tokens": 50, **fields}
        plain = peer.chat("Count to ten", **keywords).usage
        options = {"include_usage": True}
        stream = peer.chat_stream("Count to ten", stream_options=options, **keywords).usage
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        expect(all(plain[name] == stream[name] for name in names), f"{plain} and {stream}")
        expect(plain["total_tokens"] == plain["prompt_tokens"] + plain["completion_tokens"], plain)


@case("B133", "clients leave during a long prompt")
def leaves_in_prefill(peer: Peer) -> None:
    rng = random.Random(133)
    length = min((peer.context_len or 2048) // 2, 2000)
    for _ in range(20):
        prompt = [rng.randrange(20, peer.vocab_size) for _ in range(length)]
        with peer.opened(COMPLETION, peer.comp_body(prompt, max_tokens=50, stream=True)):
            time.sleep(rng.random() * 0.5)
    peer.expect_idle()


@case("B153", "tokens go to their own stream")
def own_stream(peer: Peer) -> None:
    prompts = [f"marker-{i} marker-{i} marker-{i} marker-{i} marker-" for i in range(16)]
    alone = [peer.comp(prompt, max_tokens=16).text for prompt in prompts]
    rng = random.Random(153)

    def stream(index: int) -> None:
        time.sleep(waits[index])
        if index % 4 == 3:
            with peer.opened(
                COMPLETION, peer.comp_body(prompts[index], max_tokens=200, stream=True)
            ):
                time.sleep(0.2)
            return
        found = peer.comp_stream(prompts[index], max_tokens=16).text
        expect(found == alone[index], f"{index}: {found!r} is not {alone[index]!r}")

    waits = [rng.random() for _ in prompts]
    each_at_once(stream, range(16))
