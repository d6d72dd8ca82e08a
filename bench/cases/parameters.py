"""This file has the cases of request fields: bounds, types, penalties, logprobs, seeds, several
prompts and choices."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

from bench.cases.asking import (
    CHAT,
    COMPLETION,
    Peer,
    Reply,
    Skipped,
    Watch,
    each_at_once,
    expect,
    same,
)
from bench.cases.table import case

FAST_S = 2.0
ROUTES = (CHAT, COMPLETION)


def body_for(peer: Peer, path: str, **fields: Any) -> dict[str, Any]:
    make = peer.chat_body if path == CHAT else peer.comp_body
    return make("hi", **{"max_tokens": 3, **fields})


def refuse_all(peer: Peer, field: str, values: list[Any], routes: tuple[str, ...] = ROUTES) -> None:
    """Each value of the field is refused by each route, plain and streamed, and the field named."""
    for path in routes:
        for value in values:
            for stream in (False, True):
                reply = peer.post(path, body_for(peer, path, **{field: value, "stream": stream}))
                try:
                    reply.expect_refused(400, param=field)
                except Exception as error:
                    error.args = (f"{field}={str(value)[:20]!r}: {error}",)
                    raise


@case("B031", "max_tokens = 0")
def no_tokens(peer: Peer) -> None:
    echo = peer.comp("red green blue", max_tokens=0, echo=True)
    if echo.status == 200:
        expect(echo.text == "red green blue" and echo.finish == "length", echo.choice)
        expect(echo.usage["completion_tokens"] == 0, echo.usage)
    else:
        echo.expect_refused()
    for reply in (
        peer.comp("red green blue", max_tokens=0, echo=True, logprobs=1),
        peer.comp("red green blue", max_tokens=0),
        peer.chat("hi", max_tokens=0),
    ):
        if reply.status != 200:
            reply.expect_refused()


@case("B033", "prompt over the context")
def over_context(peer: Peer) -> None:
    reply = peer.comp("word " * (2 * (peer.context_len or 8192)))
    error = reply.expect_refused()
    expect(error["code"] == "context_length_exceeded", error)
    expect(str(peer.context_len) in error["message"], f"no context length: {error['message']}")
    expect("-" not in error["message"].replace("-token", ""), error["message"])


@case("B035", "large max_tokens leaves the prompt whole")
def prompt_whole(peer: Peer) -> None:
    length = peer.context_len or 2048
    prompt = "CODEWORD\n" + "word " * (length // 8)
    count = peer.comp(prompt, max_tokens=1).usage["prompt_tokens"]
    reply = peer.comp(prompt, max_tokens=length - 1, stop=[" ", "\n", "w", "."])
    if reply.status != 200:
        reply.expect_refused()
    else:
        expect(reply.usage["prompt_tokens"] == count, f"{reply.usage}, alone {count}")


@case("B037", "NaN and Infinity in the body")
def not_numbers(peer: Peer) -> None:
    fields = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    for field in (*fields, "repetition_penalty", "logit_bias"):
        for value in ("NaN", "Infinity", "-Infinity", "1e999", '"NaN"'):
            given = f'{{"5":{value}}}' if field == "logit_bias" else value
            raw = json.dumps(body_for(peer, CHAT, temperature=1))[:-1] + f',"{field}":{given}}}'
            peer.post(CHAT, raw.encode()).expect_refused(400)


@case("B039", "repetition_penalty = 0")
def no_repetition(peer: Peer) -> None:
    refuse_all(peer, "repetition_penalty", [0, 0.0, -1])
    reply = peer.chat("hi", repetition_penalty=1e-30, max_tokens=3, logprobs=True)
    if reply.status != 200:
        reply.expect_refused()


@case("B041", "top_k at its edges")
def top_k(peer: Peer) -> None:
    greedy = peer.comp("One two", max_tokens=6).text
    for value in (10_000_001, peer.vocab_size, peer.vocab_size + 1, -1):
        peer.comp("One two", temperature=1, top_k=value, max_tokens=3).expect_ok()
    one = peer.comp("One two", temperature=1, top_k=1, max_tokens=6).text
    expect(one == greedy, f"top_k 1 gives {one!r}, greedy {greedy!r}")
    refuse_all(peer, "top_k", [-2, 1.5])


@case("B043", "same seed at the same time")
def same_seed(peer: Peer) -> None:
    def ask(seed: int) -> str:
        return peer.comp("Once", temperature=1, seed=seed, max_tokens=20, ignore_eos=True).text

    texts = each_at_once(ask, (7, 8, 7, 8, 7, 7))
    sevens, eights = [texts[i] for i in (0, 2, 4, 5)], [texts[i] for i in (1, 3)]
    expect(same(sevens) and same(eights), f"{sevens} {eights}")
    expect(sevens[0] != eights[0], "seeds 7 and 8 give the same")


@case("B045", "logit_bias outside the vocabulary")
def bias_outside(peer: Peer) -> None:
    alone = peer.comp("Once upon a time", max_tokens=60, ignore_eos=True).text
    found: list[str] = []

    def stream() -> None:
        found.append(peer.comp_stream("Once upon a time", max_tokens=60, ignore_eos=True).text)

    thread = threading.Thread(target=stream)
    thread.start()
    bad = [{str(peer.vocab_size): 5}, {str(peer.vocab_size + 100_000): -100}, {"-1": 5}]
    try:
        refuse_all(peer, "logit_bias", bad)
    finally:
        thread.join()
    expect(found == [alone], f"the stream beside: {found}")


@case("B047", "logit_bias keys and values")
def bias_values(peer: Peer) -> None:
    reply = peer.comp("x", logit_bias={"300": 100}, max_tokens=3, logprobs=0)
    tokens = reply.choice["logprobs"]["tokens"]
    expect(len(tokens) == 3 and same(tokens), f"tokens {tokens}")
    bad = [{"abc": 1}, {"5": 101}, {"5": "x"}, {"5": True}, []]
    refuse_all(peer, "logit_bias", bad)
    plain = peer.comp("One two", max_tokens=6).text
    expect(peer.comp("One two", max_tokens=6, logit_bias={"300": 0}).text == plain, "bias 0 acts")


@case("B049", "top_logprobs out of range")
def top_logprobs(peer: Peer) -> None:
    for count in (0, 20):
        reply = peer.chat("hi", logprobs=True, top_logprobs=count, max_tokens=2)
        for entry in reply.choice["logprobs"]["content"]:
            expect(len(entry["top_logprobs"]) == count, f"{len(entry['top_logprobs'])} of {count}")
    for value in (-1, 21, 1_000_000, 1.5):
        reply = peer.chat("hi", logprobs=True, top_logprobs=value, max_tokens=2)
        reply.expect_refused(400, param="top_logprobs")
    peer.chat("hi", top_logprobs=3, max_tokens=2).expect_refused(400, param="top_logprobs")


@case("B051", "minus infinity in the answer")
def minus_infinity(peer: Peer) -> None:
    bias = {str(token): -100 for token in range(20, 60)}
    for fields in ({"temperature": 1, "top_k": 1}, {"logit_bias": bias}, {"min_p": 1.0}):
        reply = peer.comp("four random words here", logprobs=5, max_tokens=3, **fields)
        logprobs = reply.choice["logprobs"]
        values = [*logprobs["token_logprobs"]]
        values += [value for top in logprobs["top_logprobs"] for value in top.values()]
        expect(all(math.isfinite(value) for value in values), f"{values}")


@case("B053", "token text is text, bytes are its bytes")
def token_text(peer: Peer) -> None:
    for prompt in ("今天", "Complete: one day in"):
        reply = peer.chat(prompt, logprobs=True, top_logprobs=5, max_tokens=8)
        for entry in reply.choice["logprobs"]["content"]:
            for token in (entry, *entry["top_logprobs"]):
                if token.get("bytes") is None:
                    continue
                try:
                    text = bytes(token["bytes"]).decode()
                except UnicodeDecodeError:
                    continue
                expect(token["token"] == text, f"{token['token']!r} is not {text!r}")


@case("B055", "echo")
def echo(peer: Peer) -> None:
    for prompt in ("Once upon", [504, 3575, 282]):
        plain = peer.comp(prompt, echo=True, max_tokens=3)
        if plain.status != 200:
            plain.expect_refused(400, param="echo")
            continue
        rest = peer.comp(prompt, max_tokens=3).text
        expect(plain.text.endswith(rest), f"{plain.text!r} does not end in {rest!r}")
        expect(not isinstance(prompt, str) or plain.text == prompt + rest, plain.text)
        stream = peer.comp_stream(prompt, echo=True, max_tokens=3)
        expect(stream.text == plain.text, f"stream {stream.text!r}, plain {plain.text!r}")
    reply = peer.comp("Once upon", echo=True, logprobs=1, max_tokens=3)
    if reply.status != 200:
        reply.expect_refused()
        return
    logprobs = reply.choice["logprobs"]
    expect(logprobs["token_logprobs"][0] is None, "the first token has a logprob")
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        expect(reply.text[offset:].startswith(token), f"{token!r} is not at {offset}")


@case("B057", "empty stop string")
def empty_stop(peer: Peer) -> None:
    whole = peer.comp("One two", max_tokens=6).text
    for value in ([], None):
        expect(peer.comp("One two", max_tokens=6, stop=value).text == whole, f"stop={value}")
    for value in ("", [""], ["", "@@@x"]):
        reply = peer.comp("One two", max_tokens=6, stop=value)
        if reply.status == 200:
            expect(reply.text == whole, f"stop={value} gives {reply.text!r}")
        else:
            reply.expect_refused(400, param="stop")


@case("B059", "min_tokens against stop strings")
def min_tokens(peer: Peer) -> None:
    whole = peer.comp("1,2,3,", max_tokens=40).text
    reply = peer.comp("1,2,3,", stop=[whole[0]], min_tokens=20, max_tokens=40)
    expect(reply.usage["completion_tokens"] >= 20, reply.usage)
    expect(whole[0] in reply.text, f"{reply.text!r} lacks {whole[0]!r}")
    expect(whole.startswith(reply.text), f"{reply.text!r} is not how {whole!r} begins")


@case("B061", "what the penalties look at")
def penalties(peer: Peer) -> None:
    prompt = "blue blue blue blue"

    def first(**fields: Any) -> tuple[str, float]:
        found = peer.comp(prompt, max_tokens=1, logprobs=1, **fields).choice
        return found["text"], found["logprobs"]["token_logprobs"][0]

    plain = first()
    for fields in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        expect(first(**fields)[0] == plain[0], f"{fields} counts the prompt")
    repeated = first(repetition_penalty=5)
    expect(repeated[0] != plain[0] or repeated[1] < plain[1] - 0.5, "the prompt is not seen")


@case("B063", "n = 0 and n = huge")
def choices(peer: Peer) -> None:
    most = peer.comp("x", n=128, max_tokens=1, temperature=1)
    if most.status != 200:
        most.expect_refused(400, param="n")
    before = peer.resident_bytes() if peer.processes else 0
    with Watch(peer) as watch:
        for path in ROUTES:
            for value in (0, -1, 1.5, True, 129, 3_000_000):
                reply = peer.post(path, body_for(peer, path, n=value))
                reply.expect_refused(400, param="n")
                expect(reply.seconds < FAST_S, f"n={value} took {reply.seconds:.1f} s")
    watch.expect_healthy(FAST_S)
    if peer.processes:
        grown = peer.resident_bytes() - before
        expect(grown < 50 << 20, f"{grown >> 20} MiB more")


@case("B065", "several prompts and n")
def prompts_and_choices(peer: Peer) -> None:
    fields = {"n": 2, "echo": True, "max_tokens": 3, "temperature": 1, "seed": 3}
    words = ["one", "two", "three"]
    reply = peer.comp(words, **fields)
    reply.expect_ok()
    found = reply.body["choices"]
    expect([each["index"] for each in found] == list(range(6)), "indices")
    for each in found:
        expect(each["text"].startswith(words[each["index"] // 2]), f"{each}")
    single = sum(peer.comp(word, max_tokens=1).usage["prompt_tokens"] for word in words)
    expect(reply.usage["prompt_tokens"] == single, f"{reply.usage}, alone {single}")
    stream = peer.comp_stream(words, **fields)
    for index, text in enumerate(reply.texts):
        got = "".join(choice["text"] for choice in stream.of(index))
        expect(got == text, f"{index}: stream {got!r}, plain {text!r}")


@case("B067", "wrong JSON types")
def wrong_types(peer: Peer) -> None:
    refuse_all(peer, "max_tokens", ["10", True, 1.5, -1, 1e30, [], {}])
    refuse_all(peer, "stop", [5, [5], {}])
    refuse_all(peer, "messages", [{}, "x", [5], []], (CHAT,))
    for path in ROUTES:
        peer.post(path, body_for(peer, path, stream="true")).expect_refused(400, param="stream")
        peer.post(path, body_for(peer, path, model=5)).expect_refused(400, param="model")
        peer.post(path, body_for(peer, path, user=None)).expect_ok()
        for raw in (b"", b"[]", b"5", b"null", b"{", b"\xff", b'{"model"'):
            peer.post(path, raw).expect_refused()


@case("B069", "seed at its edges")
def seeds(peer: Peer) -> None:
    def ask(seed: Any) -> Reply:
        return peer.comp("Once", temperature=1, seed=seed, max_tokens=8)

    ask(None).expect_ok()
    for seed in (0, -1, 2**31, 2**63 - 1, -(2**63)):
        expect(ask(seed).text == ask(seed).text, f"seed {seed} is not repeatable")
    refuse_all(peer, "seed", [2**63, 2**64, 1.5, "7"])
    if same([ask(None).text for _ in range(4)]):
        raise Skipped("four unseeded answers were the same: chance, or no draw")
