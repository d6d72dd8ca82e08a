"""This file has the cases of what is asked: prompts, messages, templates."""

from __future__ import annotations

import time
from typing import Any

from bench.cases.asking import CHAT, COMPLETION, Peer, Reply, Watch, expect, stream_beside
from bench.cases.table import case


@case("B071", "empty prompt")
def empty_prompt(peer: Peer) -> None:
    for prompt in ("", [""], [], [[]]):
        reply = peer.comp(prompt, max_tokens=2)
        if reply.status != 200 or prompt in ([], [[]]):
            reply.expect_refused()
        else:
            expect(reply.usage["prompt_tokens"] == 1, f"{prompt}: {reply.usage}")


@case("B073", "token ids outside the vocabulary")
def ids_outside(peer: Peer) -> None:
    size = peer.vocab_size
    bad: list[Any] = [
        [999_999_999],
        [size],
        [-1],
        [2**31],
        [2**63],
        [1.5],
        [True],
        [[1, 2], [size]],
    ]
    for prompt in bad:
        peer.comp(prompt, max_tokens=2).expect_refused()
    peer.comp([size - 1], max_tokens=2).expect_ok()


@case("B075", "one bad prompt in a list")
def one_bad(peer: Peer) -> None:
    before = peer.counted("histrio_generated_tokens_total")
    long = "word " * (2 * (peer.context_len or 8192))
    peer.comp(["fine", "", long], max_tokens=200).expect_refused()
    peer.comp(["fine", long], max_tokens=200).expect_refused()
    peer.expect_idle()
    made = peer.metric("histrio_generated_tokens_total") - before
    expect(made == 0, f"{made:.0f} tokens were made")


@case("B077", "nothing is cut silently")
def not_cut(peer: Peer) -> None:
    length = peer.context_len or 8192
    peer.chat("word " * (2 * length) + "Say xyzzy.", max_tokens=2).expect_refused()
    count = peer.chat("word " * 50, max_tokens=1).usage["prompt_tokens"]
    more = peer.chat("word " * 100, max_tokens=1).usage["prompt_tokens"]
    expect(more == count + 50, f"50 words are {count} tokens, 100 are {more}")


def ask_role(peer: Peer, message: dict[str, Any]) -> Reply:
    messages = [message, {"role": "user", "content": "hi"}]
    body = {"model": peer.model, "messages": messages, "temperature": 0, "max_tokens": 3}
    return peer.post(CHAT, body)


@case("B079", "content given as parts")
def parts(peer: Peer) -> None:
    texts = ["My code is ", "4417. ", "Repeat it."]
    given = [{"type": "text", "text": text} for text in texts]
    for role in ("user", "system", "assistant"):
        split = ask_role(peer, {"role": role, "content": given})
        whole = ask_role(peer, {"role": role, "content": "".join(texts)})
        expect(split.usage["prompt_tokens"] == whole.usage["prompt_tokens"], f"role {role}")
        expect(split.text == whole.text, f"role {role}: {split.text!r}, {whole.text!r}")
        for content in ([], [{"text": "x"}], [{"type": "image_url", "image_url": {"url": "x"}}]):
            ask_role(peer, {"role": role, "content": content}).expect_refused()


@case("B083", "unknown roles")
def roles(peer: Peer) -> None:
    for role in ("function", "robot", "", "USER", 5, None):
        ask_role(peer, {"role": role, "content": "x"}).expect_refused()
    developer = ask_role(peer, {"role": "developer", "content": "Be brief."})
    if developer.status != 200:
        developer.expect_refused()


@case("B085", "NUL and other odd characters in a message")
def odd_characters(peer: Peer) -> None:
    short = peer.chat("alpha", max_tokens=1).usage["prompt_tokens"]
    for odd in ("\x00", "\x01", "\u200b", "\ufeff"):
        text = "alpha{} omega: answer with the number nine"
        reply = peer.chat(text.format(odd), max_tokens=1)
        if reply.status != 200:
            reply.expect_refused()
            continue
        plain = peer.chat(text.format(" "), max_tokens=1).usage["prompt_tokens"]
        count = reply.usage["prompt_tokens"]
        expect(abs(count - plain) <= 4 and count > short + 4, f"{odd!r}: {count}, not {plain}")
    lone = b'{"model":"%s","messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}'
    reply = peer.post(CHAT, lone % peer.model.encode())
    if reply.status != 200:
        reply.expect_refused()


@case("B089", "continue the last assistant turn")
def continue_turn(peer: Peer) -> None:
    messages = [
        {"role": "user", "content": "Finish:"},
        {"role": "assistant", "content": "The sky is"},
    ]
    body: dict[str, Any] = {
        "model": peer.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 6,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    first, second = peer.post(CHAT, body), peer.post(CHAT, body)
    expect(first.text == second.text, f"{first.text!r}, then {second.text!r}")
    echo = peer.post(CHAT, {**body, "echo": True})
    if echo.status == 200:
        expect(echo.text == "The sky is" + first.text, f"echo {echo.text!r}")
    peer.post(CHAT, {**body, "add_generation_prompt": True}).expect_refused()


@case("B091", "a request's own chat template")
def own_template(peer: Peer) -> None:
    for fields in (
        {"chat_template_kwargs": {"chat_template": "{{ 7*7 }}"}},
        {"chat_template": "{{ 7*7 }}"},
        {"chat_template_kwargs": {"messages": []}},
    ):
        peer.chat("hi", max_tokens=2, **fields).expect_refused()
    plain = peer.chat("hi", max_tokens=1).usage["prompt_tokens"]
    flags = peer.chat("hi", max_tokens=1, chat_template_kwargs={"enable_thinking": False})
    expect(flags.usage["prompt_tokens"] == plain, "an unknown flag changes the prompt")


@case("B093", "one enormous word")
def enormous_word(peer: Peer) -> None:
    with stream_beside(peer) as gaps:
        with Watch(peer) as watch:
            for text in ("a" * 1_000_000, "\u4e00" * 300_000, " " * 1_000_000):
                reply = peer.chat(text, max_tokens=2)
                reply.expect_refused()
                expect(reply.seconds < 10, f"refused after {reply.seconds:.1f} s")
        watch.expect_healthy(1.0)
    expect(max(gaps) < 5, f"the stream beside stood still for {max(gaps):.1f} s")


@case("B169", "health while tokenizing and prefilling")
def health_while_busy(peer: Peer) -> None:
    length = (peer.context_len or 2048) // 4
    body = peer.comp_body([300] * length, max_tokens=2, stream=True)
    with Watch(peer) as watch:
        links = []
        for _ in range(32):
            link = peer.opened(COMPLETION, body)
            link.__enter__()
            links.append(link)
        peer.chat("word " * 1_000_000, max_tokens=2).expect_refused(400, 413)
        time.sleep(2)
        for link in links:
            link.__exit__(None, None, None)
    watch.expect_healthy(1.0)
    peer.expect_idle()
