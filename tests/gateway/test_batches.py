"""Files and batches: what is read, kept, run behind the others, and survives a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.batches.lines import ERRORS_MAX, read_lines
from actors.gateway.batches.multipart import boundary_of, split_form
from actors.gateway.batches.store import BatchStore
from actors.gateway.doors.batch_runner import BATCH_PRIORITY, is_for_now
from actors.gateway.doors.batches import UPLOADS_MAX
from actors.gateway.errors import Refused
from messages.batches import BatchBody
from messages.types import Fault, Problem
from tests.gateway.street import Street, until_true
from tests.gateway.test_site import Place, listening
from tests.gateway.test_system import house, url_of

CHAT = "/v1/chat/completions"
Client = openai.AsyncOpenAI


def line(name: str, text: str = "one two", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "M", "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


# The form


def form(*parts: tuple[str, bytes], boundary: str = "xx") -> bytes:
    body = b"".join(
        b"--" + boundary.encode() + b"\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"
        for head, content in parts
    )
    return body + b"--" + boundary.encode() + b"--\r\n"


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_a_form_is_split_into_what_it_was_made_of(contents: list[bytes]) -> None:
    heads = [f'content-disposition: form-data; name="n{i}"' for i in range(len(contents))]
    parts = split_form(form(*zip(heads, contents, strict=True), boundary="b0undary"), b"b0undary")
    assert [part.content for part in parts] == contents
    assert [part.name for part in parts] == [f"n{i}" for i in range(len(contents))]


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_form_or_refused(body: bytes, begins: bool) -> None:
    try:
        split_form(b"--xx\r\n" + body if begins else body, b"xx")
    except Refused as refused:
        assert refused.problem.fault is Fault.INVALID


FORM = "multipart/form-data"


@pytest.mark.parametrize("given_type", ["", "text/plain", FORM, f"{FORM}; boundary="])
def test_what_is_no_form_is_refused(given_type: str) -> None:
    with pytest.raises(Refused):
        boundary_of(given_type)
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"


def test_a_name_may_be_of_any_letters() -> None:
    head = 'Content-Disposition: form-data; name="file"; filename="a \u00e9.jsonl"'
    (part,) = split_form(form((head, b"x")), b"xx")
    assert part.name == "file" and part.filename is not None and part.filename.endswith(".jsonl")


# The lines


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (jsonl(line("a")) + b"{oops\n", "invalid_json_line", 2),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[" * 5000, "invalid_json_line", 1),
        (jsonl({"custom_id": "a"}), "invalid_json_line", 1),
        (jsonl({**line("a"), "method": "GET"}), "invalid_json_line", 1),
        (jsonl(line("a"), line("b", url="/v1/completions")), "mismatched_endpoint", 2),
        (jsonl(line("a"), line("a")), "duplicate_custom_id", 2),
        (jsonl({**line("a"), "body": 3}), "invalid_request", 1),
    ],
)
def test_a_wrong_line_is_named(text: bytes, code: str, number: int | None) -> None:
    lines, errors = read_lines(text, CHAT)
    assert not lines and errors[0].code == code and errors[0].line == number


def test_lines_keep_their_order_and_bodies() -> None:
    lines, errors = read_lines(b"\n" + jsonl(line("a", "x"), line("b", "y")) + b"\r\n", CHAT)
    assert not errors and [item.custom_id for item in lines] == ["a", "b"]
    assert json.loads(lines[1].body)["messages"][0]["content"] == "y"
    _, errors = read_lines(b"x\n" * 1000, CHAT)
    assert len(errors) == ERRORS_MAX


# The store


BODY = BatchBody(input_file_id="file-in", endpoint=CHAT, completion_window="24h")


def started(store: BatchStore, batch_id: str, count: int = 3) -> None:
    lines, _ = read_lines(jsonl(*(line(f"c{i}") for i in range(count))), CHAT)
    store.add_batch(batch_id, BODY, "gateway", 100)
    store.start(batch_id, lines, 101)


def test_a_result_is_kept_once_and_outlives_the_store(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    started(store, "batch_1")
    store.put_result("batch_1", 1, b'{"x":1}', is_failed=False)
    store.put_result("batch_1", 1, b'{"x":2}', is_failed=True)
    store.check()
    store.close()
    store = BatchStore(tmp_path)
    taken = []
    after = -1
    while (item := store.take_line("batch_1", after)) is not None:
        taken.append(item.custom_id)
        after = item.number
    assert taken == ["c0", "c2"]
    store.put_result("batch_1", 0, b'{"x":0}', is_failed=True)
    store.put_result("batch_1", 2, b'{"x":3}', is_failed=False)
    for _ in range(2):  # a crash between the files and the status has it done again
        store.base.execute("UPDATE batches SET status = 'finalizing' WHERE id = 'batch_1'")
        done = store.finish("batch_1", "completed", "file-o", "file-e", 200)
        store.check()
        if _ == 0:
            assert (done.output_file_id, done.error_file_id) == ("file-o", "file-e")
            assert store.path_of("file-o").read_bytes() == b'{"x":1}\n{"x":3}\n'
            assert store.path_of("file-e").read_bytes() == b'{"x":0}\n'
    assert done.request_counts.completed == 2 and done.request_counts.failed == 1
    store.close()


def test_a_status_only_goes_forward(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    started(store, "batch_1")
    assert not store.move("batch_1", ("validating",), "finalizing", 1)
    assert store.move("batch_1", ("in_progress",), "cancelling", 105)
    assert store.take_line("batch_1", -1) is None
    done = store.finish("batch_1", "cancelled", "file-o", "file-e", 110)
    assert done.status == "cancelled" and done.cancelled_at == 110 and done.cancelling_at == 105
    assert not store.move("batch_1", ("in_progress", "validating"), "cancelling", 120)
    store.check()
    store.close()


def test_files_expire_and_are_listed_in_pages(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    for i in range(4):
        expires_at = 50 if i == 1 else None
        store.add_file(
            f"file-{i}", (b"x" * i,), filename="f", purpose="batch", now_s=i, expires_at=expires_at
        )
    assert store.usage() == (4, 6)

    def ids(now_s: int, **fields: Any) -> list[str]:
        asked = {"after": None, "limit": 10, "purpose": None, "newest_first": False, **fields}
        return [file.id for file in store.files(now_s, **asked)]

    assert ids(49) == ["file-0", "file-1", "file-2", "file-3"]
    assert ids(50) == ["file-0", "file-2", "file-3"]
    assert not store.path_of("file-1").exists()
    assert ids(50, after="file-2") == ["file-3"]
    assert ids(50, after="file-2", newest_first=True) == ["file-0"]
    assert ids(50, limit=1) == ["file-0", "file-2"]
    assert ids(50, purpose="batch_output") == []
    assert store.delete_file("file-0") and not store.delete_file("file-0")
    store.check()
    store.close()


def test_a_batch_of_nobody_is_taken_over(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    started(store, "batch_1")
    store.adopt("front", ("front", "gateway"))
    assert store.next_batch("front") is None
    store.adopt("front", ("front",))
    found = store.next_batch("front")
    assert found is not None and found.id == "batch_1"
    store.close()


def test_only_what_is_for_now_is_tried_again() -> None:
    assert is_for_now(Problem(fault=Fault.OVERLOADED, message="x"))
    assert is_for_now(Problem(fault=Fault.UNAVAILABLE, message="x"))
    assert not is_for_now(Problem(fault=Fault.UNAVAILABLE, message="x", code="interrupted"))
    assert not is_for_now(Problem(fault=Fault.INVALID, message="x"))


# Over HTTP


@asynccontextmanager
async def place_of(folder: Path, **settings: Any) -> AsyncIterator[tuple[Place, Client]]:
    async with listening(batch_dir=str(folder), **settings) as place:
        base = f"http://127.0.0.1:{place.port}/v1"
        async with (
            httpx.AsyncClient() as web,
            openai.AsyncOpenAI(
                base_url=base, api_key="x", http_client=web, max_retries=0
            ) as client,
        ):
            yield place, client


async def made(place: Place, client: Client, content: bytes, url: Any = CHAT) -> Any:
    file = await place.until(client.files.create(file=("in.jsonl", content), purpose="batch"))
    return await place.until(
        client.batches.create(
            input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"k": "v"}
        )
    )


async def until_ended(place: Place, client: Client, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            batch = await place.until(client.batches.retrieve(batch_id))
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch


async def content_of(place: Place, client: Client, file_id: str) -> list[Any]:
    got = await place.until(client.files.content(file_id))
    return [json.loads(text) for text in got.text.splitlines()]


async def test_the_official_client_runs_a_batch(tmp_path: Path) -> None:
    async with place_of(tmp_path, batch_running_max=2) as (place, client):
        lines = [line(f"c{i}", f"word {i}") for i in range(5)]
        lines.insert(2, line("bad", temperature=9))
        lines.insert(3, line("streamed", stream=True))
        batch = await made(place, client, jsonl(*lines))
        assert batch.status == "validating" and batch.metadata == {"k": "v"}
        done = await until_ended(place, client, batch.id)
        assert done.status == "completed" and done.completed_at is not None
        counts = done.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (7, 5, 2)
        answers = await content_of(place, client, done.output_file_id)
        texts = {
            item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
            for item in answers
        }
        assert texts == {f"c{i}": f"word {i}" for i in range(5)}
        wrong = await content_of(place, client, done.error_file_id)
        assert [item["response"]["status_code"] for item in wrong] == [400, 400]
        assert wrong[0]["response"]["body"]["error"]["param"] == "temperature"
        listed = await place.until(client.files.list(purpose="batch_output"))
        assert {file.id for file in listed.data} == {done.output_file_id, done.error_file_id}
        page = await place.until(client.batches.list(limit=1))
        assert page.data[0].id == batch.id
        gone = await place.until(client.files.delete(done.error_file_id))
        assert gone.deleted
        with pytest.raises(openai.NotFoundError):
            await place.until(client.files.retrieve(done.error_file_id))


async def test_responses_and_completions_run_in_batches(tmp_path: Path) -> None:
    async with place_of(tmp_path) as (place, client):
        for url, body, found in (
            ("/v1/responses", {"model": "M", "input": "one two"}, "output"),
            ("/v1/completions", {"model": "M", "prompt": "one two"}, "choices"),
        ):
            item = {"custom_id": "a", "method": "POST", "url": url, "body": body}
            batch = await made(place, client, jsonl(item), url)
            done = await until_ended(place, client, batch.id)
            (answer,) = await content_of(place, client, done.output_file_id)
            assert "one two" in json.dumps(answer["response"]["body"][found])


async def test_a_wrong_input_fails_the_batch(tmp_path: Path) -> None:
    async with place_of(tmp_path) as (place, client):
        batch = await made(place, client, b"nonsense\n")
        done = await until_ended(place, client, batch.id)
        assert done.status == "failed" and done.errors is not None
        assert done.errors.data[0].code == "invalid_json_line" and done.errors.data[0].line == 1
        for fields in (
            {"input_file_id": "file-none", "endpoint": CHAT},
            {"input_file_id": batch.input_file_id, "endpoint": "/v1/else"},
        ):
            with pytest.raises(openai.BadRequestError):
                await place.until(
                    client.batches.create(completion_window="24h", **fields)  # type: ignore[arg-type]
                )
        with pytest.raises(openai.BadRequestError):
            await place.until(client.files.create(file=("a", b"x"), purpose="assistants"))


async def test_a_file_may_expire_and_is_read_as_it_was_sent(tmp_path: Path) -> None:
    async with place_of(tmp_path) as (place, client):
        content = bytes(range(256)) * 4000  # in several pieces
        file = await place.until(
            client.files.create(
                file=("a.bin", content),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )
        )
        assert file.expires_at == file.created_at + 3600 and file.bytes == len(content)
        assert (await place.until(client.files.content(file.id))).content == content
        with pytest.raises(openai.BadRequestError):
            await place.until(
                client.files.create(
                    file=("a", b"x"),
                    purpose="batch",
                    expires_after={"anchor": "created_at", "seconds": 1},
                )
            )


async def test_a_file_that_is_being_read_comes_whole_while_the_site_closes(tmp_path: Path) -> None:
    """Its answer has begun: there is no place in it for a refusal."""
    async with place_of(tmp_path) as (place, client):
        content = bytes(range(256)) * 4000
        file = await place.until(client.files.create(file=("a.bin", content), purpose="batch"))
        app = place.site.app
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 2:
                await app.batches.close()

        scope = {"type": "http", "method": "GET", "path": f"/v1/files/{file.id}/content",
                 "headers": [], "query_string": b"", "state": {}}  # fmt: skip
        await place.until(app(scope, receive, send))
        kinds = [message["type"] for message in sent]
        assert kinds == ["http.response.start", *["http.response.body"] * (len(sent) - 1)]
        assert sent[0]["status"] == 200 and len(sent) > 4
        assert b"".join(message["body"] for message in sent[1:]) == content


async def test_batches_go_behind_what_clients_wait_for(tmp_path: Path) -> None:
    async with place_of(tmp_path) as (place, client):
        place.street.back.mute = True
        await made(place, client, jsonl(line("a")))
        gateway = place.street.gateway
        await place.until_true(lambda: len(gateway.recovery.ledger))
        (record,) = list(gateway.recovery.ledger)
        assert record.encode.priority == BATCH_PRIORITY


async def test_a_cancelled_batch_ends_at_once_with_what_it_has(tmp_path: Path) -> None:
    async with place_of(tmp_path, batch_running_max=1) as (place, client):
        batch = await made(place, client, jsonl(line("a"), line("b", "x " * 40), line("c")))
        runner = place.site.app.batches.runner
        assert runner is not None
        store = runner.store
        await place.until_true(lambda: store.known(batch.id).request_counts.completed == 1)
        place.street.back.paused = True
        await place.until_true(lambda: runner.streams)
        await place.until(client.batches.cancel(batch.id))
        place.street.back.paused = False
        done = await until_ended(place, client, batch.id)
        assert done.status == "cancelled" and done.output_file_id is not None
        (answer,) = await content_of(place, client, done.output_file_id)
        assert answer["custom_id"] == "a"
        with pytest.raises(openai.BadRequestError):
            other = await made(place, client, jsonl(line("a")))
            await until_ended(place, client, other.id)
            await place.until(client.batches.cancel(other.id))
        store.check()


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with place_of(tmp_path, batch_running_max=1) as (place, client):
        batch = await made(place, client, jsonl(*(line(f"c{i}") for i in range(4))))
        runner = place.site.app.batches.runner
        assert runner is not None
        store = runner.store
        await place.until_true(lambda: store.known(batch.id).request_counts.completed == 1)
        place.street.back.paused = True
    async with place_of(tmp_path) as (place, client):
        done = await until_ended(place, client, batch.id)
        assert done.status == "completed" and done.request_counts.completed == 4
        answers = await content_of(place, client, done.output_file_id)
        assert [item["custom_id"] for item in answers] == [f"c{i}" for i in range(4)]


async def test_a_batch_out_of_time_says_what_it_did_not_do(tmp_path: Path) -> None:
    async with place_of(tmp_path) as (place, client):
        place.street.back.mute = True
        batch = await made(place, client, jsonl(line("a"), line("b")))
        await place.until_true(lambda: len(place.street.gateway.recovery.ledger) == 2)
    store = BatchStore(tmp_path)
    store.base.execute("UPDATE batches SET expires_at = 1")
    store.close()
    async with place_of(tmp_path) as (place, client):
        done = await until_ended(place, client, batch.id)
        assert done.status == "expired" and done.output_file_id is None
        wrong = await content_of(place, client, done.error_file_id)
        assert [item["error"]["code"] for item in wrong] == ["batch_expired"] * 2


async def test_runs_of_one_seed_keep_each_others_files_and_batches(tmp_path: Path) -> None:
    """The operator may set the seed, and with it the ids of calls."""
    ids: list[tuple[str, str]] = []
    texts = [jsonl(line("a", text)) for text in ("one", "two")]
    for text in texts:
        async with (
            house(batch_dir=str(tmp_path)) as system,
            httpx.AsyncClient(base_url=url_of(system)) as web,
        ):
            oracle: Any = system.local("tokenizer")
            oracle.is_mute = True
            files = {"file": ("in.jsonl", text)}
            file = (await web.post("/v1/files", files=files, data={"purpose": "batch"})).json()
            body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch = await web.post("/v1/batches", json=body)
            assert batch.status_code == 200
            ids.append((file["id"], batch.json()["id"]))
            for (file_id, batch_id), kept in zip(ids, texts, strict=False):
                assert (await web.get(f"/v1/files/{file_id}/content")).content == kept
                found = (await web.get(f"/v1/batches/{batch_id}")).json()
                assert found["input_file_id"] == file_id
    assert len({name for pair in ids for name in pair}) == 4


async def test_a_whole_house_runs_batches_and_goes_on_with_them(tmp_path: Path) -> None:
    ids: list[str] = []
    for life in range(2):
        async with (
            house(batch_dir=str(tmp_path)) as system,
            httpx.AsyncClient(base_url=url_of(system)) as web,
        ):
            oracle: Any = system.local("tokenizer")
            oracle.is_mute = life == 0
            if life == 0:
                files = {"file": ("in.jsonl", jsonl(line("a"), line("b")))}
                got = await web.post("/v1/files", files=files, data={"purpose": "batch"})
                body = {"input_file_id": got.json()["id"], "endpoint": CHAT}
                got = await web.post("/v1/batches", json={**body, "completion_window": "24h"})
                assert got.status_code == 200
                ids.append(got.json()["id"])
                gateway: Any = system.local("gateway")
                async with asyncio.timeout(60):
                    await until_true(lambda held=gateway.recovery.ledger: len(held) == 2)
                continue
            async with asyncio.timeout(60):
                while True:
                    batch = (await web.get(f"/v1/batches/{ids[0]}")).json()
                    if batch["status"] == "completed":
                        break
            content = (await web.get(f"/v1/files/{batch['output_file_id']}/content")).text
            assert content.count('"yes"') == 2
            await system.drain(5.0)


async def test_uploads_are_few_at_a_time(tmp_path: Path) -> None:
    street = Street(batch_dir=str(tmp_path))
    await street.app.batches.open()
    headers = {"content-type": "multipart/form-data; boundary=xx"}
    held = [
        street.request("POST", "/v1/files", headers=headers, chunks=[b"--xx\r\n"], ends=False)
        for _ in range(UPLOADS_MAX)
    ]
    await street.step()
    got = await street.ask(street.request("POST", "/v1/files", headers=headers, chunks=[b"x"]))
    assert got.status == 503 and got.headers["retry-after"]
    for client in held:
        client.drop()
    await street.finish(*held)
    body = form(
        ('content-disposition: form-data; name="purpose"', b"batch"),
        ('content-disposition: form-data; name="file"; filename="a"', b"x"),
    )
    got = await street.ask(street.request("POST", "/v1/files", headers=headers, chunks=[body]))
    assert got.status == 200 and got.json()["bytes"] == 1
    wrong = street.request("POST", "/v1/files", {"purpose": "batch"})
    assert (await street.ask(wrong)).status == 400
    await street.app.batches.close()
    street.assert_idle()


async def test_without_a_folder_they_are_off() -> None:
    street = Street()
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/x")):
        got = await street.ask(street.request(method, path))
        assert got.status == 404 and got.error()["code"] == "not_enabled"
    street.assert_idle()


def remove(folder: Path, name: str) -> None:
    (path,) = [path for path in folder.rglob("*") if path.name == name]
    path.unlink()


async def test_a_file_that_is_gone_when_it_is_opened_is_not_there(tmp_path: Path) -> None:
    """Deleted by another request between the look and the opening: as if it had never been."""
    async with place_of(tmp_path) as (place, client):
        file = await place.until(client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch"))
        remove(tmp_path, file.id)
        with pytest.raises(openai.NotFoundError):
            await place.until(client.files.content(file.id))


async def test_who_asks_for_a_batch_while_the_gateway_closes_is_told_so(tmp_path: Path) -> None:
    async with place_of(tmp_path) as (place, client):
        batch = await made(place, client, jsonl(line("a")))
        await until_ended(place, client, batch.id)
        await place.until(place.site.app.batches.close())
        with pytest.raises(openai.InternalServerError) as caught:
            await place.until(client.batches.retrieve(batch.id))
        assert caught.value.status_code == 503
