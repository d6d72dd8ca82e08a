"""A real server's embeddings, scores and rankings, asked by the official clients.

What is right is what the kernels say of the same tokens in this process, to the bit: the kernels
are held to transformers by their own tests.
"""

from __future__ import annotations

import base64
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from actors.gateway.scoring import rerank_chat
from actors.tokenizer.chat import ChatTemplates
from actors.vocab.vocab import Vocab
from kernels.batch import Sampling
from kernels.runner import Runner, RunnerOptions
from tests.house.server import WAIT_S, Server, eventually, stopped
from tests.house.tiny import make_model
from tests.kernels.driver import Driver

TEXTS = ["The house", "Once upon a time there was a house by the sea", "a", "The house by the sea"]


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    batches = tmp_path_factory.mktemp("batches")
    words = ("--placement", "processes", "--batch-dir", str(batches))
    found = Server(tiny, tmp_path_factory.mktemp("logs"), *words)
    try:
        yield found.wait_ready()
    finally:
        found.close()


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return Vocab.load(str(tiny))


@pytest.fixture(scope="module")
def runner(tiny: Path) -> Runner:
    return Runner.load(tiny, RunnerOptions(dtype="float32", kv_tokens=4096, threads=1))


def read(runner: Runner, prompts: list[list[int]], **sampling: Any) -> list[np.ndarray]:
    """What the kernels make of the prompts."""
    driver = Driver(runner)
    driver.generate(prompts, 1, sampling=Sampling(temperature=0.0, **sampling))
    return [driver.vectors[index] for index in range(len(prompts))]


def post(server: Server, path: str, **body: Any) -> Any:
    answered = httpx.post(server.url + path, json=body, timeout=WAIT_S)
    assert answered.status_code == 200, answered.text
    return answered.json()


def test_the_official_client_gets_the_last_hidden_states(
    server: Server, vocab: Vocab, runner: Runner
) -> None:
    ids = [vocab.encode(text) for text in TEXTS]
    expected = read(runner, ids, want_vector=True)
    create = server.client().embeddings.create
    # Without a format the client asks for base64, and decodes it.
    by_default = create(model="tiny-llama", input=TEXTS)
    as_floats = create(model="tiny-llama", input=TEXTS, encoding_format="float")
    of_ids = create(model="tiny-llama", input=ids, user="me")
    for answer in (by_default, as_floats, of_ids):
        assert [row.index for row in answer.data] == list(range(len(TEXTS)))
        for row, vector in zip(answer.data, expected, strict=True):
            assert (np.array(row.embedding, np.float32) == vector).all()
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    (alone,) = create(model="tiny-llama", input=TEXTS[1]).data
    assert (np.array(alone.embedding, np.float32) == expected[1]).all()
    raw = post(server, "/v1/embeddings", model="tiny-llama", input="a", encoding_format="base64")
    data = base64.b64decode(raw["data"][0]["embedding"])
    assert (np.frombuffer(data, "<f4") == expected[2]).all()


def test_what_this_model_cannot_is_refused_by_name(server: Server) -> None:
    for fields, param in (({"dimensions": 8}, "dimensions"), ({"input": "x " * 5000}, "input")):
        body = {"model": "tiny-llama", "input": "a", **fields}
        answered = httpx.post(server.url + "/v1/embeddings", json=body, timeout=WAIT_S)
        assert answered.status_code == 400
        assert answered.json()["error"]["param"] == param


def test_vectors_are_cut_where_the_models_config_says_that_they_may_be(
    tmp_path: Path, serve: Callable[..., Server]
) -> None:
    model = make_model(tmp_path / "nested")
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["matryoshka_dimensions"] = [8, 16]
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    server = serve("--placement", "inline", model=model).wait_ready()
    create = server.client().embeddings.create
    whole = np.array(create(model="nested", input="The house").data[0].embedding)
    for count in (8, 16, len(whole)):
        (row,) = create(model="nested", input="The house", dimensions=count).data
        head = whole[:count] / np.linalg.norm(whole[:count])
        assert np.abs(np.array(row.embedding) - head).max() < 1e-6
    with pytest.raises(openai.BadRequestError, match="8, 16") as refused:
        create(model="nested", input="The house", dimensions=12)
    assert refused.value.param == "dimensions"


def test_scores_are_the_probabilities_of_the_labels(
    server: Server, vocab: Vocab, runner: Runner
) -> None:
    labels = [5, 9, 300]
    items = [" by the sea", " upon a time"]
    wish = {"query": "The house", "items": items, "label_token_ids": labels}
    ids = [vocab.encode("The house" + item) for item in items]
    expected = [np.exp(row.astype(float)) for row in read(runner, ids, label_ids=tuple(labels))]
    bare = post(server, "/v1/score", **wish)["scores"]
    assert bare == [pytest.approx(row.tolist()) for row in expected]
    shared = post(server, "/score", **wish, apply_softmax=True)["scores"]
    assert shared == [pytest.approx((row / row.sum()).tolist()) for row in expected]
    query, item = vocab.encode("The house"), vocab.encode("a", add_special=False)
    wish = {"query": query, "items": [item], "label_token_ids": list(range(512))}
    (everything,) = post(server, "/v1/score", **wish)["scores"]
    assert math.fsum(everything) == pytest.approx(1.0)


def test_documents_are_ranked_by_what_the_model_would_answer(
    server: Server, vocab: Vocab, runner: Runner
) -> None:
    templates = ChatTemplates(dict(vocab.templates), vocab.named)
    prompts = []
    for text in TEXTS:
        chat = rerank_chat("Be true.", "Where?", text, 0.0)
        rendered = templates.render(chat, chars_max=10_000, context_len=1024)
        prompts.append(vocab.encode(rendered, add_special=False))
    yes, no = (vocab.encode(word, add_special=False)[0] for word in ("yes", "no"))
    rows = read(runner, prompts, label_ids=(yes, no))
    scores = [1 / (1 + math.exp(float(row[1]) - float(row[0]))) for row in rows]
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    wish = {"query": "Where?", "documents": TEXTS, "instruct": "Be true."}
    native = post(server, "/v1/rerank", **wish)
    assert [row["index"] for row in native] == order
    assert [row["score"] for row in native] == pytest.approx([scores[index] for index in order])
    results = post(server, "/rerank", **wish, model="tiny-llama", top_n=2)["results"]
    assert [row["index"] for row in results] == order[:2]
    assert results[0]["document"] == {"text": TEXTS[order[0]]}


def test_ollamas_client_gets_the_same_vectors(server: Server) -> None:
    expected = server.client().embeddings.create(model="tiny-llama", input=TEXTS)
    client = ollama.Client(host=server.url, timeout=WAIT_S)
    answer = client.embed(model="tiny-llama", input=TEXTS)
    assert [list(row) for row in answer.embeddings] == [row.embedding for row in expected.data]
    assert answer.prompt_eval_count == expected.usage.prompt_tokens
    old = client.embeddings(model="tiny-llama", prompt=TEXTS[0])
    assert list(old.embedding) == expected.data[0].embedding
    # What is too long is cut to what fits, unless that is not wanted.
    client.embed(model="tiny-llama", input="sea " * 3000)
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(model="tiny-llama", input="sea " * 3000, truncate=False)
    client.close()


def test_a_batch_may_be_of_embeddings(server: Server) -> None:
    client = server.client()
    expected = client.embeddings.create(model="tiny-llama", input=TEXTS, encoding_format="float")
    lines = [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "tiny-llama", "input": text, "encoding_format": "float"},
        }
        for index, text in enumerate(TEXTS)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )

    def done() -> Any:
        found = client.batches.retrieve(made.id)
        return found if found.status == "completed" else None

    batch = eventually(done, "the batch is completed")
    assert batch.request_counts.completed == len(TEXTS)
    output = client.files.content(batch.output_file_id).text.splitlines()
    found = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, output)}
    for index, row in enumerate(expected.data):
        vectors = found[f"line-{index}"]["data"]
        assert vectors[0]["embedding"] == row.embedding


def running_count(server: Server) -> int:
    """As the scheduler says now; the metrics may be of a while ago."""
    count: int = server.get("/v1/loads").json()["loads"][0]["num_running_reqs"]
    return count


@pytest.mark.parametrize("room", ["replica/worker", "replica/scheduler"])
def test_vectors_are_the_same_when_a_process_is_killed_under_them(
    room: str, server: Server
) -> None:
    texts = [f"{index} house by the sea " * 20 for index in range(40)]
    create = server.client().embeddings.create
    expected = [row.embedding for row in create(model="tiny-llama", input=texts).data]
    pid = server.pid_of(room)
    interrupted = server.metric("histrio_interruptions_total")
    with ThreadPoolExecutor(1) as pool:
        with stopped(server.pid_of("replica/worker")):
            asking = pool.submit(create, model="tiny-llama", input=texts)
            eventually(lambda: running_count(server) > 0, "requests run")
            os.kill(pid, signal.SIGKILL)
            eventually(
                lambda: server.metric("histrio_interruptions_total") > interrupted,
                "requests were interrupted",
            )
        answer = asking.result(WAIT_S)
    assert [row.embedding for row in answer.data] == expected
    server.wait_back(room, pid)
