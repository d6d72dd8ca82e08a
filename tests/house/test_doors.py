"""A real server behind keys, with responses that are gone on from and a batch that outlives it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.house.server import WAIT_S, Server, eventually

CHAT = "/v1/chat/completions"


def client_of(server: Server, key: str = "alpha") -> openai.OpenAI:
    return server.client(key)


def request(number: int, model: str) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Letter {number}"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}


def test_keys_responses_and_a_batch_through_a_kill(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\n")
    words = ("--placement", "inline", "--api-key-file", str(keys))
    words += ("--batch-dir", str(tmp_path / "batches"), "--batch-running", "2")
    server = serve(*words).wait_ready()
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "wrong").models.list()
    assert server.get("/health").status_code == 200
    assert httpx.post(server.url + "/flush_cache", timeout=WAIT_S).status_code == 403
    client = client_of(server)
    model = client.models.list().data[0].id
    first = client.responses.create(
        model=model, input="The house", max_output_tokens=8, temperature=0
    )
    assert first.status == "incomplete" and first.output_text
    text, final = "", None
    for event in client.responses.create(
        model=model, input="And?", previous_response_id=first.id, max_output_tokens=8, stream=True
    ):
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert final is not None and final.output_text == text
    assert final.usage is not None and first.usage is not None
    assert final.usage.input_tokens > first.usage.input_tokens
    want = {f"c{i}": client.chat.completions.create(**request(i, model)["body"]) for i in range(12)}
    lines = "".join(json.dumps(request(i, model)) + "\n" for i in range(12))
    file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    def some_are_done() -> bool:
        found = client.batches.retrieve(batch.id)
        return found.request_counts is not None and found.request_counts.completed > 0

    eventually(some_are_done, "a first result")
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    server = serve(*words).wait_ready()
    client = client_of(server)
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch's end")
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None and done.request_counts.completed == 12
    assert done.output_file_id is not None
    answers = [json.loads(line) for line in client.files.content(done.output_file_id).iter_lines()]
    assert [answer["custom_id"] for answer in answers] == list(want)
    for answer in answers:
        message = answer["response"]["body"]["choices"][0]["message"]
        assert message["content"] == want[answer["custom_id"]].choices[0].message.content
