"""Settings: every field has a flag and a key, the command line wins, and what is wrong is named."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import run
from actors.resolve import Machine, resolve
from actors.settings import (
    FLAGS,
    INTERNAL,
    SECTIONS,
    SettingsError,
    add_flags,
    given_flags,
    read_config,
)
from messages.config import Config


def fields() -> set[str]:
    return {
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(section.type)
    }


def parsed(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return given_flags(vars(parser.parse_args(words)))


def test_every_field_has_one_flag() -> None:
    keys = [row.key for row in FLAGS]
    assert len(keys) == len(set(keys))
    assert set(keys) | INTERNAL == fields()
    assert not set(keys) & INTERNAL


def test_every_flag_is_spelled_once() -> None:
    assert len({row.flag for row in FLAGS}) == len(FLAGS)


def test_every_section_has_a_title() -> None:
    assert set(SECTIONS) == set(Config.__struct_fields__)


def test_help_names_every_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    assert all(row.flag in text for row in FLAGS)


def test_nothing_given_is_the_default() -> None:
    assert read_config(None, parsed()) == Config()
    assert read_config("", parsed()) == Config()


def test_the_command_line_beats_the_file_and_the_file_the_default() -> None:
    text = "[scheduler]\nrunning_max = 5\nqueued_max = 7\n[gateway]\nport = 9000\n"
    config = read_config(text, parsed("--max-running", "3"))
    assert config.scheduler.running_max == 3
    assert config.scheduler.queued_max == 7
    assert config.gateway.port == 9000
    assert config.scheduler.policy == Config().scheduler.policy


def test_a_flag_set_to_its_default_beats_the_file() -> None:
    default = Config().scheduler.running_max
    config = read_config("[scheduler]\nrunning_max = 5\n", parsed("--max-running", str(default)))
    assert config.scheduler.running_max == default


def test_a_switch_can_be_turned_off() -> None:
    assert read_config(None, parsed("--no-prefix-cache")).cache.prefix_cache is False
    assert read_config(None, parsed("--check")).runtime.check is True


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[scheduler]\nrunning_mx = 5\n", "`scheduler.running_mx` (did you mean"),
        ("[cache]\nrunning_max = 5\n", "`scheduler.running_max`"),
        ("[nonsense]\n", "`nonsense`"),
        ("[nonsense]\na = 1\n", "`nonsense.a`"),
        ("port = 9000\n", "`port` (did you mean `gateway.port`?)"),
        ("[gateway]\nhttp = false\n", "`gateway.http`"),
        ("[scheduler]\na = 1\n[cache]\nb = 2\n", "`cache.b`, `scheduler.a`"),
        ("[scheduler]\nqueued_max = 0\n", "serve.toml: scheduler.queued_max"),
        ('[scheduler]\nrunning_max = "8"\n', "serve.toml: scheduler.running_max"),
        ("[scheduler]\nrunning_max = true\n", "serve.toml: scheduler.running_max"),
        ('[runtime]\nplacement = "moon"\n', "'moon' is not one of inline, threads, processes"),
        ("[worker]\nmemory_fraction = 2.0\n", "serve.toml: worker.memory_fraction"),
        ("this is not toml", "serve.toml is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_named(text: str, named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_config(text, {}, source="serve.toml")
    assert named in str(caught.value)


def test_a_wrong_flag_is_refused_with_the_flag_named() -> None:
    with pytest.raises(SettingsError, match="^--page-size: Expected `int` >= 1, got 0"):
        read_config(None, parsed("--page-size", "0"))


@given(st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers() | st.text())))
def test_any_keys_give_a_config_or_an_error_of_ours(values: dict[str, dict[str, Any]]) -> None:
    known = {row.key for row in FLAGS}
    text = "".join(
        f"[{quoted(section)}]\n" + "".join(f"{quoted(k)} = {literal(v)}\n" for k, v in kv.items())
        for section, kv in values.items()
    )
    strange = [f"{s}.{k}" for s, kv in values.items() for k in kv if f"{s}.{k}" not in known]
    if strange or any(section not in SECTIONS for section in values):
        with pytest.raises(SettingsError):
            read_config(text)
    else:
        assert isinstance(read_config(text), Config)


def quoted(text: str) -> str:
    return '"' + "".join(f"\\U{ord(c):08X}" for c in text) + '"'


def literal(value: int | str) -> str:
    return quoted(value) if isinstance(value, str) else str(max(-(2**63), min(value, 2**63 - 1)))


def machine(**changes: Any) -> Machine:
    found = Machine(core_count=2, model_path="/m", model_name="m", log_dir="/log", free_port=4711)
    return found._replace(**changes)


def test_an_address_that_is_not_to_be_had_is_named_with_the_reason() -> None:
    for host, port in (("127.0.0.1", 70_000), ("no host", 8000), ("192.0.2.1", 8000)):
        with pytest.raises(run.CannotListen, match="--port"):
            run.check_address(host, port)


def test_resolve_settles_what_was_open_and_says_why() -> None:
    config, reasons = resolve(Config(), machine())
    assert config.model.path == "/m"
    assert config.model.name == "m"
    assert config.worker.threads == 2
    assert config.log.dir == "/log"
    assert any(reason.startswith("worker.threads = 2") for reason in reasons)


def test_resolve_leaves_what_the_user_chose() -> None:
    given = read_config(None, parsed("--served-model-name", "x", "--threads", "7", "--port", "1"))
    config, _ = resolve(given, machine())
    assert (config.model.name, config.worker.threads, config.gateway.port) == ("x", 7, 1)


def test_each_run_has_a_seed_of_its_own_unless_one_is_given() -> None:
    config, reasons = resolve(Config(), machine(drawn_seed=99))
    assert config.runtime.seed == 99
    assert any(reason.startswith("runtime.seed = 99") for reason in reasons)
    given = read_config(None, parsed("--seed", "7"))
    assert resolve(given, machine(drawn_seed=99)).config.runtime.seed == 7


def test_resolve_gives_a_free_port_for_port_zero() -> None:
    config, _ = resolve(read_config(None, parsed("--port", "0")), machine())
    assert config.gateway.port == 4711


def test_resolve_makes_room_for_one_token_of_each_running_request() -> None:
    given = read_config(None, parsed("--prefill-budget", "8", "--max-running", "32"))
    config, reasons = resolve(given, machine())
    assert config.scheduler.prefill_budget == 32
    assert any("prefill_budget" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("gpu_count", "device", "found"),
    [
        (0, "auto", (64, 512, 0.5, "the CPU computes")),
        (1, "auto", (256, 8192, 0.9, "a GPU computes")),
        (1, "cpu", (64, 512, 0.5, "the CPU computes")),
    ],
)
def test_steps_are_as_large_as_the_device_is(
    gpu_count: int, device: str, found: tuple[int, int, float, str]
) -> None:
    given = read_config(None, parsed("--device", device))
    config, reasons = resolve(given, machine(gpu_count=gpu_count))
    scheduler = config.scheduler
    assert (scheduler.running_max, scheduler.prefill_budget) == found[:2]
    assert config.worker.memory_fraction == found[2]
    assert f"scheduler.running_max = {found[0]} ({found[3]})" in reasons
    given = read_config(None, parsed("--max-running", "5", "--memory-fraction", "0.3"))
    config, _ = resolve(given, machine(gpu_count=gpu_count))
    assert (config.scheduler.running_max, config.worker.memory_fraction) == (5, 0.3)


def test_resolve_is_idempotent() -> None:
    once, _ = resolve(Config(), machine())
    twice, reasons = resolve(once, machine())
    assert once == twice
    assert not reasons
