"""The tree as data: what lives where, with one front end and with several."""

from __future__ import annotations

from actors.resolve import Machine, resolve
from actors.runtime.spec import Child, Supervisor
from actors.tree import build, paths_of
from messages.config import Config, GatewayConfig, ModelConfig, Paths, RuntimeConfig


def places(branch: Supervisor, prefix: str = "") -> dict[str, Child]:
    found: dict[str, Child] = {}
    for child in branch.children:
        path = f"{prefix}{child.name}"
        if isinstance(child, Supervisor):
            found |= places(child, path + "/")
        else:
            found[path] = child
    return found


def config_of(front_ends: int, placement: str = "processes", *, http: bool = True) -> Config:
    return Config(
        gateway=GatewayConfig(http=http),
        runtime=RuntimeConfig(front_ends=front_ends, placement=placement),
    )


def test_one_front_end_has_the_short_paths_and_one_process() -> None:
    root, nodes = build(config_of(1))
    found = places(root)
    paths = Paths()
    assert set(found) == {
        paths.metrics,
        paths.worker,
        paths.cache,
        paths.scheduler,
        paths.detokenizer,
        paths.router,
        paths.tokenizer,
        paths.gateway,
    }
    assert [node.name for node in nodes] == ["front", "engine", "worker"]
    config = found["gateway"].arguments["gateway"]
    assert isinstance(config, GatewayConfig) and not config.shares_port
    scheduler = config_of(1).scheduler
    assert config.places == scheduler.running_max + scheduler.queued_max
    assert config.slots == scheduler.running_max


def test_each_front_end_has_a_process_and_shares_none_with_another() -> None:
    root, nodes = build(config_of(3))
    found = places(root)
    for index in range(3):
        mine = {p for p, child in found.items() if child.node == f"front{index}"}
        rooms = ("detokenizer", "tokenizer", "gateway")
        assert mine == {f"fronts/{index}/{room}" for room in rooms}
        assert found[f"fronts/{index}/gateway"].arguments["gateway"].shares_port  # type: ignore[attr-defined]
    assert {child.node for child in found.values()} == {node.name for node in nodes}
    assert found["metrics"].node == "metrics"


def test_paths_name_actors_of_the_tree() -> None:
    for count in (1, 2, 4):
        root, _ = build(config_of(count))
        found = places(root)
        every = paths_of(count)
        assert len(every) == count
        for index, paths in enumerate(every):
            assert paths.gateways[index] == paths.gateway
            assert paths.detokenizers[index] == paths.detokenizer
            assert found[paths.gateway].arguments["paths"] == paths
            assert {*paths.gateways, *paths.detokenizers, paths.tokenizer} <= set(found)


def test_without_http_there_is_one_front_end() -> None:
    root, _ = build(config_of(4, http=False))
    assert places(root)["gateway"].node == "main"


def test_several_front_ends_on_one_loop() -> None:
    root, nodes = build(config_of(2, "inline"))
    assert nodes == ()
    assert {child.node for child in places(root).values()} == {"main"}


def settled(config: Config, *, core_count: int, gpu_count: int) -> int:
    machine = Machine(core_count, "/m", "m", "/log", gpu_count=gpu_count)
    return resolve(config, machine).config.runtime.front_ends


def test_only_a_hot_spare_has_the_model_or_its_vocabulary_loaded() -> None:
    heavy = {"replica/worker", "tokenizer", "detokenizer"}
    for hot in (False, True):
        config = Config(runtime=RuntimeConfig(hot_spare=hot))
        found = places(build(config)[0])
        prepared = {path for path, child in found.items() if child.is_prepared}
        assert prepared == (heavy if hot else set())


def test_front_ends_are_as_many_as_the_machine_has_cores_to_spare() -> None:
    assert settled(config_of(0), core_count=64, gpu_count=0) == 1
    assert settled(config_of(0), core_count=4, gpu_count=1) == 1
    assert settled(config_of(0), core_count=8, gpu_count=1) == 2
    assert settled(config_of(0), core_count=16, gpu_count=1) == 4
    assert settled(config_of(0), core_count=64, gpu_count=1) == 4
    assert settled(config_of(0, "inline"), core_count=64, gpu_count=1) == 1
    on_cpu = Config(model=ModelConfig(device="cpu"))
    assert settled(on_cpu, core_count=64, gpu_count=1) == 1
    assert settled(config_of(3), core_count=4, gpu_count=0) == 3
