"""Engine: the tree for Python users. The same prompt has the same answer by every door."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from actors.engine import Delta, Engine, Refusal, StartError
from actors.settings import SettingsError
from actors.source import SourceError
from tests.house.server import eventually

PROMPTS = ["The house", "Once upon a time", "x"]


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    logs = tmp_path_factory.mktemp("engine-logs")
    with Engine(str(tiny), dtype="float32", kv_tokens=4096, threads=1, log_dir=str(logs)) as engine:
        yield engine


def test_a_prompt_is_completed(engine: Engine) -> None:
    found = engine.generate("The house", max_tokens=8, temperature=0, ignore_eos=True)
    assert found.text
    assert found.finish_reason == "length"
    assert found.usage.completion_tokens == 8
    assert len(found.token_ids) == 8


def test_a_stream_joins_to_the_completion(engine: Engine) -> None:
    whole = engine.generate("The house", max_tokens=32, temperature=0)
    deltas = list(engine.stream("The house", max_tokens=32, temperature=0))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(i for delta in deltas for i in delta.token_ids) == whole.token_ids
    assert deltas[-1].finish_reason == whole.finish_reason
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_many_prompts_get_the_answers_that_each_gets_alone(engine: Engine) -> None:
    alone = [engine.generate(prompt, max_tokens=16, temperature=0).text for prompt in PROMPTS]
    many = engine.generate(PROMPTS, max_tokens=16, temperature=0)
    assert [found.text for found in many] == alone


def test_each_gives_refusals_in_their_place(engine: Engine) -> None:
    asked = [
        {"prompt": "a", "max_tokens": 4},
        {"prompt": "b", "temperature": -1},
        {"messages": [{"role": "user", "content": "c"}], "max_tokens": 4},
    ]
    first, second, third = engine.each(asked)
    assert not isinstance(first, Refusal)
    assert isinstance(second, Refusal)
    assert second.param == "temperature"
    assert not isinstance(third, Refusal)


def test_a_chat_is_the_same_streamed_and_whole(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    whole = engine.chat(messages, max_tokens=12, temperature=0)
    deltas = engine.stream(messages=messages, max_tokens=12, temperature=0)
    assert "".join(delta.text for delta in deltas) == whole.text


@pytest.mark.parametrize(
    ("keywords", "param"),
    [({"temperature": -1}, "temperature"), ({"stop": [""]}, "stop"), ({"n": 0}, "n")],
)
def test_a_bad_argument_is_refused_and_named(
    engine: Engine, keywords: dict[str, object], param: str
) -> None:
    with pytest.raises(Refusal) as caught:
        engine.generate("x", **keywords)
    assert caught.value.param == param


def test_a_misspelt_argument_is_named(engine: Engine) -> None:
    with pytest.raises(Refusal, match="no such argument: max_token"):
        engine.generate("x", max_token=3)
    with pytest.raises(Refusal, match="no such argument: max_token"):
        list(engine.stream(messages=[{"role": "user", "content": "x"}], max_token=3))


def test_texts_of_several_choices_are_never_joined(engine: Engine) -> None:
    with pytest.raises(Refusal, match="one text"):
        engine.generate("x", n=2, max_tokens=2)
    deltas = list(engine.stream("x", n=2, max_tokens=2, ignore_eos=True))
    assert {delta.index for delta in deltas} == {0, 1}


def test_a_prompt_and_messages_exclude_each_other(engine: Engine) -> None:
    with pytest.raises(Refusal, match="either a prompt or messages"):
        list(engine.stream("x", messages=[{"role": "user", "content": "y"}]))
    with pytest.raises(Refusal, match="either a prompt or messages"):
        list(engine.stream())


def test_what_json_cannot_say_is_refused(engine: Engine) -> None:
    with pytest.raises(Refusal, match="not a value"):
        engine.generate("x", stop=object())


def test_leaving_a_stream_early_ends_its_request(engine: Engine) -> None:
    for _ in range(3):
        for _ in engine.stream("x", max_tokens=400, ignore_eos=True):
            break
    # They hold nothing: a request that needs most of the pool is served.
    found = engine.generate("y", max_tokens=450, temperature=0, ignore_eos=True)
    assert found.usage.completion_tokens == 450


async def first_of(deltas: AsyncIterator[Delta]) -> Delta:
    return await anext(deltas)


async def test_the_async_twins_answer_the_same(engine: Engine) -> None:
    whole = await engine.agenerate("The house", max_tokens=16, temperature=0)
    parts = [d async for d in engine.astream("The house", max_tokens=16, temperature=0)]
    assert "".join(delta.text for delta in parts) == whole.text

    async def on_its_own_loop() -> list[Delta]:
        return [d async for d in engine.astream("The house", max_tokens=16, temperature=0)]

    near = engine.call(on_its_own_loop())
    assert "".join(delta.text for delta in near) == whole.text
    assert near[-1].finish_reason == whole.finish_reason
    with pytest.raises(Refusal, match="temperature"):
        engine.call(first_of(engine.astream("x", temperature=-1)))
    many = await asyncio.gather(
        *(engine.agenerate(prompt, max_tokens=8, temperature=0) for prompt in PROMPTS)
    )
    assert all(found.text for found in many)
    chat = await engine.achat([{"role": "user", "content": "Hello"}], max_tokens=4)
    assert chat.usage.completion_tokens <= 4


def test_threads_may_share_an_engine(engine: Engine) -> None:
    expected = engine.generate("The house", max_tokens=16, temperature=0).text
    found: list[str] = []

    def ask() -> None:
        found.append(engine.generate("The house", max_tokens=16, temperature=0).text)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


@pytest.mark.parametrize("placement", ["threads", "processes"])
def test_another_placement_answers_the_same(
    placement: str, engine: Engine, tiny: Path, tmp_path: Path
) -> None:
    expected = engine.generate("The house", max_tokens=16, temperature=0).text
    with Engine(
        str(tiny),
        dtype="float32",
        kv_tokens=4096,
        threads=1,
        placement=placement,
        log_dir=str(tmp_path),
    ) as other:
        assert other.generate("The house", max_tokens=16, temperature=0).text == expected


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="no such setting: max_runing"):
        Engine(max_runing=8)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"), Engine(str(tmp_path / "nowhere")):
        pass


def test_a_start_that_fails_says_why_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    weights = (tiny / "model.safetensors").read_bytes()
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((tiny / name).read_bytes())
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with (
        pytest.raises(StartError, match=r"model\.safetensors"),
        Engine(str(broken), log_dir=str(tmp_path)),
    ):
        pass
    # An actor's threads are told to end, and not waited for.
    eventually(lambda: threading.active_count() <= before, "no thread is left")


def test_an_engine_that_is_not_started_says_so() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        Engine().generate("x")
