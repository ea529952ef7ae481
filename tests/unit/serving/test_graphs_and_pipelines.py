from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.config_file import parse_config
from ovmstrio.config.specs import AllVersions, GraphSpec, ModelSpec, PipelineNode, PipelineSpec, ServableSpec
from ovmstrio.core.errors import InvalidRequest, ModelFailure, Problem, ServiceLoading, VersionRetired
from ovmstrio.protocols.kserve.extensions import repository_index
from ovmstrio.server.kinds import KINDS
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.records import VersionState
from ovmstrio.serving.registry import Registry
from ovmstrio.serving.source import ConfigSource
from tests.support.graphs import graph_calling
from tests.support.pipelines import dag_entry
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running
from tests.unit.serving.conftest import Loading

LOADING, AVAILABLE, END = VersionState.LOADING, VersionState.AVAILABLE, VersionState.END


def _graph(root: Path, *problems: Problem, name: str = "s") -> GraphSpec:
    path = root / "graph.pbtxt"
    if not path.exists():
        path.write_text('handler_path: "handler.py"')
        (root / "handler.py").write_text("pass")
    return GraphSpec(name=name, base_path=root, graph_path=path, problems=problems)


def _pipeline(root: Path, *models: str, version: int = 0, library: str = "", **settings: Any) -> PipelineSpec:
    nodes = [PipelineNode(name=name, model_name=name, version=version) for name in models]
    if library:
        nodes.append(PipelineNode(name="custom", library="l"))
        settings["libraries"] = {"l": root / library}
    fields: dict[str, Any] = {"name": "s", "inputs": (), "outputs": (), **settings}
    return PipelineSpec(base_path=root, nodes=tuple(nodes), **fields)


def _model(root: Path, *versions: int, name: str = "m", **settings: Any) -> ModelSpec:
    return ModelSpec(name=name, base_path=add_versions(root / name, *versions), **settings)


def _state(registry: Registry) -> tuple[int, VersionState, str]:
    (status,) = registry.statuses()["s"]
    return status.version, status.state, status.error_code


@pytest.fixture(params=["graph", "pipeline"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def spec(kind: str, tmp_path: Path) -> ServableSpec:
    return _graph(tmp_path) if kind == "graph" else _pipeline(tmp_path)


# What graphs and pipelines have in common


async def test_every_integer_stands_for_the_single_version(spec: ServableSpec, registry: Registry) -> None:
    await registry.apply([spec])
    for version in ("", "0", "1", "7", "-3"):
        with await registry.lease("s", version) as lease:
            assert (lease.name, lease.version) == ("s", "1")
        assert registry.peek("s", version) is lease.servable
        assert registry.is_ready("s", version)
    for call in (registry.peek, registry.is_ready):
        with pytest.raises(InvalidRequest, match="must be an integer"):
            call("s", "one")
    with pytest.raises(InvalidRequest, match="must be an integer"):
        await registry.lease("s", "one")
    assert registry.available_versions("s") == [1]


async def test_a_call_waits_for_a_load_within_the_bound(
    kind: str, spec: ServableSpec, loader: StubLoader, autojump_clock: trio.testing.MockClock
) -> None:
    gate = loader.hold("s", 1)
    registry = registry_of(loader, poll_seconds=0, load_wait_seconds=5)
    async with running(registry), trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [spec])
        await loader.begun["s", 1].wait()
        assert _state(registry) == (1, LOADING, "OK")
        assert not registry.is_ready("s")
        assert registry.readiness.reason == f"loading 1 of 1 {kind}s: s"
        started = trio.current_time()
        with pytest.raises(ServiceLoading, match=rf'^{kind} "s" is not loaded yet$'):
            await registry.lease("s", "3")
        assert trio.current_time() - started == 5
        gate.set()
        with await registry.lease("s") as lease:
            assert lease.version == "1"


async def test_callers_load_after_their_callees_and_are_known_meanwhile(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    async with loading(graph_calling(tmp_path, "s"), _pipeline(tmp_path, "m"), _model(tmp_path, 1), name="s"):
        await trio.testing.wait_all_tasks_blocked()
        assert loader.attempts["g", 1] == 0
        assert [status.state for name in ("s", "g") for status in registry.statuses()[name]] == [LOADING, LOADING]
        assert registry.readiness.reason == "loading 2 of 3 models, pipelines and graphs: g, s"
    assert [servable.spec.name for servable in loader.opened] == ["m", "s", "g"]


async def test_a_failed_load_is_reported_and_other_services_are_ready(
    kind: str, spec: ServableSpec, tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    loader.fail("s", 1)
    result = await registry.apply([spec, _graph(tmp_path, name="t")])
    assert [(status.kind, status.name) for status in result.failures] == [(kind, "s")]
    assert _state(registry) == (1, LOADING, "FAILED_PRECONDITION")
    for version in ("", "4"):
        with pytest.raises(ServiceLoading) as caught:
            await registry.lease("s", version)
        expected = f'{kind} "s" is not loaded yet: its last load failed: the stub is set to fail'
        assert caught.value.message == expected
    assert (registry.is_ready("s"), registry.is_ready("t")) == (False, True)
    assert registry.readiness.reason == f'{kind} "s": version 1: the stub is set to fail'
    index = repository_index(DataPlane(registry))
    assert [(entry.name, entry.version, entry.state) for entry in index] == [
        ("s", "1", "UNAVAILABLE"),
        ("t", "1", "READY"),
    ]


async def test_a_retry_shows_the_reason_of_the_last_failure_until_it_succeeds(
    kind: str, spec: ServableSpec, loader: StubLoader, registry: Registry, autojump_clock: trio.testing.MockClock
) -> None:
    loader.fail("s", 1)
    await registry.apply([spec])
    gate = loader.hold("s", 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.rescan)
        await loader.begun["s", 1].wait()
        (entry,) = repository_index(DataPlane(registry))
        assert (entry.state, entry.reason) == ("LOADING", "the stub is set to fail")
        assert registry.readiness.reason == f'{kind} "s": version 1: the stub is set to fail'
        with pytest.raises(ServiceLoading, match="its last load failed: the stub is set to fail"):
            await registry.lease("s", "")
        loader.recover("s", 1)
        gate.set()
    (entry,) = repository_index(DataPlane(registry))
    assert (entry.state, entry.reason) == ("READY", "")


async def test_wrong_settings_fail_without_a_load(spec: ServableSpec, loader: StubLoader, registry: Registry) -> None:
    wrong = spec.model_copy(update={"problems": (Problem("no JSON", file="subconfig.json"),)})
    await registry.apply([wrong])
    assert _state(registry) == (1, LOADING, "FAILED_PRECONDITION")
    assert loader.attempts["s", 1] == 0
    await registry.apply([spec])
    assert _state(registry) == (1, AVAILABLE, "OK")
    await registry.apply([wrong])
    assert _state(registry) == (1, AVAILABLE, "FAILED_PRECONDITION")
    await registry.apply([spec])
    assert _state(registry) == (1, AVAILABLE, "OK")
    assert loader.attempts["s", 1] == 1


async def test_a_retired_service_can_come_back(
    kind: str, spec: ServableSpec, loader: StubLoader, registry: Registry
) -> None:
    await registry.apply([spec])
    with await registry.lease("s"):
        await registry.apply([])
        assert _state(registry) == (1, VersionState.UNLOADING, "OK")
        with pytest.raises(VersionRetired, match=rf'^{kind} "s" is retired$'):
            await registry.lease("s", "2")
        await trio.testing.wait_all_tasks_blocked()
        assert loader.opened[0].closed == 0
    await trio.testing.wait_all_tasks_blocked()
    assert _state(registry) == (1, END, "OK")
    assert (loader.opened[0].closed, registry.is_ready("s")) == (1, False)
    await registry.apply([spec])
    assert _state(registry) == (1, AVAILABLE, "OK")


async def test_a_name_changes_its_kind_and_changes_back(
    spec: ServableSpec, tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    model = _model(tmp_path, 1, 2, name="s")
    await registry.apply([model])
    await registry.apply([spec])
    with await registry.lease("s", "2") as lease:
        assert lease.version == "1"
    await registry.apply([model])
    with await registry.lease("s") as lease:
        assert lease.version == "2"
    with pytest.raises(VersionRetired, match=r"of model .* is retired"):
        await registry.lease("s", "1")
    await trio.testing.wait_all_tasks_blocked()
    assert loader.open_versions == [("s", 2)]


# Files of graphs


@pytest.mark.parametrize("name", ["graph.pbtxt", "handler.py", "helper.py"])
@pytest.mark.parametrize("operation", ["rescan", "apply"])
async def test_changed_files_reload_a_graph(
    tmp_path: Path, name: str, operation: str, loader: StubLoader, registry: Registry
) -> None:
    await registry.apply([_graph(tmp_path)])

    async def reload() -> bool:
        return (await (registry.rescan() if operation == "rescan" else registry.apply([_graph(tmp_path)]))).changed

    assert await reload() is False
    (tmp_path / name).write_text('handler_path: "handler.py" # changed')
    assert await reload() is True
    assert await reload() is False
    await trio.testing.wait_all_tasks_blocked()
    assert (loader.attempts["s", 1], loader.open_versions) == (2, [("s", 1)])


async def test_changed_settings_reload_a_graph_and_another_line_does_not(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    spec = _graph(tmp_path)
    await registry.apply([spec])
    await registry.apply([spec.model_copy(update={"origin": "elsewhere:3"})])
    assert loader.attempts["s", 1] == 1
    await registry.apply([spec.model_copy(update={"subconfig": tmp_path / "s.json"})])
    assert loader.attempts["s", 1] == 2


async def test_a_file_that_changes_during_a_load_causes_one_more(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    async with loading(_graph(tmp_path), name="s"):
        (tmp_path / "handler.py").write_text("changed = True")
    assert loader.attempts["s", 1] == 1
    await registry.rescan()
    await registry.rescan()
    assert loader.attempts["s", 1] == 2


async def test_a_failed_reload_leaves_the_old_graph_serving(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    await registry.apply([_graph(tmp_path)])
    old = registry.peek("s")
    loader.fail("s", 1)
    (tmp_path / "handler.py").write_text("changed = True")
    result = await registry.rescan()
    assert [status.reason for status in result.failures] == ["the stub is set to fail"]
    assert _state(registry) == (1, AVAILABLE, "FAILED_PRECONDITION")
    assert registry.peek("s") is old
    assert registry.readiness.ready
    loader.recover("s", 1)
    assert (await registry.rescan()).changed
    assert registry.peek("s") is not old
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(old, StubServable)
    assert old.closed == 1


async def test_polling_loads_edited_and_repaired_graphs(
    tmp_path: Path, loader: StubLoader, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(registry_of(loader, poll_seconds=1)) as registry:
        await registry.apply([_graph(tmp_path)])
        for text, code in (("a = 1", "OK"), ("broken", "FAILED_PRECONDITION"), ("repaired = 1", "OK")):
            loader.recover("s", 1)
            if code != "OK":
                loader.fail("s", 1)
            before = registry.peek("s")
            (tmp_path / "handler.py").write_text(text)
            while (registry.peek("s") is before, _state(registry)) != (code != "OK", (1, AVAILABLE, code)):
                await registry.wait_change()


# Configuration files


async def test_a_changed_subconfig_is_a_changed_configuration(tmp_path: Path, registry: Registry) -> None:
    _graph(tmp_path)
    config, subconfig = tmp_path / "config.json", tmp_path / "subconfig.json"
    config.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": [{"name": "s", "base_path": "."}]}))
    source = ConfigSource(config, registry, partial(parse_config, KINDS.values()))
    await source.reload(force=True)
    assert await source.reload() is False
    inner = {"name": "inner", "base_path": str(add_versions(tmp_path / "inner", 1))}
    subconfig.write_text(json.dumps({"model_config_list": [{"config": inner}]}))
    assert await source.reload() is True
    assert registry.available_versions("inner") == [1]
    assert await source.reload() is False
    subconfig.unlink()
    assert await source.reload() is True
    assert registry.available_versions("inner") == []


@pytest.mark.parametrize(
    ("section", "entry"),
    [
        ("model_config_list", {"config": {"name": "long", "base_path": "x" * 300}}),
        ("mediapipe_config_list", {"name": "long", "base_path": "x" * 300}),
        ("mediapipe_config_list", {"name": "long", "base_path": ".", "python": "x" * 300}),
        ("handler_config_list", {"name": "long", "path": "x" * 300}),
        ("op_pipeline_config_list", {"name": "long", "path": "x" * 300}),
        ("custom_node_library_config_list", {"name": "long", "base_path": "x" * 300}),
    ],
)
async def test_a_path_that_cannot_be_looked_up_fails_only_its_service(
    tmp_path: Path, registry: Registry, section: str, entry: dict[str, Any]
) -> None:
    model = {"config": {"name": "m", "base_path": str(add_versions(tmp_path / "m", 1))}}
    document: dict[str, Any] = {"model_config_list": [model]}
    document[section] = [*document.get(section, []), entry]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(document))
    source = ConfigSource(config, registry, partial(parse_config, KINDS.values()))
    with suppress(ModelFailure):
        await source.reload()
    assert registry.available_versions("m") == [1]


async def test_an_edit_that_only_moves_a_pipeline_in_its_file_loads_nothing(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    pipeline = dag_entry("p", "m", ("a", "a"), ("b", "b"))
    document = {"model_config_list": [], "pipeline_config_list": [pipeline]}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(document))
    source = ConfigSource(config, registry, partial(parse_config, KINDS.values()))
    await source.reload()
    config.write_text(json.dumps(document, indent=3))
    await source.reload()
    assert loader.attempts["p", 1] == 1
    loader.fail("p", 1)
    config.write_text(json.dumps({**document, "pipeline_config_list": [{**pipeline, "inputs": ["c"]}]}))
    with pytest.raises(ModelFailure, match=r'^pipeline "p": the stub is set to fail'):
        await source.reload()


# Libraries and models of pipelines


class _CheckingLoader(StubLoader):
    registry: Registry
    seconds = 0

    async def __call__(self, spec: ServableSpec, version: int, directory: Path) -> StubServable:
        if isinstance(spec, PipelineSpec):
            for node in spec.nodes:
                with await self.registry.lease(node.model_name, str(node.version)):
                    pass
        servable = await super().__call__(spec, version, directory)  # type: ignore[arg-type]
        await trio.sleep(self.seconds)
        return servable


@pytest.fixture
async def checking() -> AsyncIterator[_CheckingLoader]:
    loader = _CheckingLoader()
    loader.registry = registry_of(loader, poll_seconds=0)
    async with running(loader.registry):
        yield loader
    assert loader.misuse == []


@pytest.mark.parametrize("library", ["l.so", "l.py"])
async def test_a_changed_library_reloads_its_pipelines(
    tmp_path: Path, library: str, loader: StubLoader, registry: Registry
) -> None:
    file = tmp_path / library
    file.write_text("1")
    await registry.apply([_pipeline(tmp_path, library=library), _pipeline(tmp_path, name="other")])
    assert (await registry.rescan()).changed is False
    changes: list[Callable[[], object]] = [lambda: file.write_text("22"), file.unlink, file.touch]
    for attempt, change in enumerate(changes, start=2):
        change()
        assert (await registry.rescan()).changed is True
        assert loader.attempts["s", 1] == attempt
    (tmp_path / "helper.py").touch()
    assert (await registry.rescan()).changed is (library == "l.py")
    assert loader.attempts["other", 1] == 1


async def test_a_built_in_library_has_no_file_to_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    monkeypatch.chdir(tmp_path)
    await registry.apply([_pipeline(tmp_path, library="x").model_copy(update={"libraries": {"l": Path("add_one")}})])
    (tmp_path / "add_one").touch()
    assert (await registry.rescan()).changed is False


async def test_a_reloaded_model_has_its_pipelines_validated_again(tmp_path: Path, checking: _CheckingLoader) -> None:
    registry = checking.registry
    rest = [_model(tmp_path, 1, name="n"), _pipeline(tmp_path, "m"), _pipeline(tmp_path, "n", name="other")]
    await registry.apply([_model(tmp_path, 1), *rest])
    result = await registry.apply([_model(tmp_path, 1, nireq=2), *rest])
    assert (result.changed, result.failures) == (True, ())
    assert checking.attempts == {("m", 1): 2, ("n", 1): 1, ("s", 1): 2, ("other", 1): 1}
    assert (await registry.rescan()).changed is False


@pytest.mark.parametrize(("version", "attempts"), [(0, 2), (1, 1)])
async def test_a_new_default_version_reloads_the_pipelines_that_call_the_default(
    tmp_path: Path, version: int, attempts: int, checking: _CheckingLoader
) -> None:
    model = _model(tmp_path, 1, version_policy=AllVersions())
    await checking.registry.apply([model, _pipeline(tmp_path, "m", version=version)])
    add_versions(model.base_path, 2)
    await checking.registry.rescan()
    assert checking.registry.available_versions("m") == [1, 2]
    assert checking.attempts["s", 1] == attempts


async def test_polling_loads_a_pipeline_when_its_model_appears(tmp_path: Path) -> None:
    loader, model = _CheckingLoader(), _model(tmp_path)
    loader.registry = registry_of(loader, poll_seconds=0.01)
    async with running(loader.registry) as registry:
        await registry.apply([model, _pipeline(tmp_path, "m")])
        assert _state(registry) == (1, LOADING, "FAILED_PRECONDITION")
        add_versions(model.base_path, 1)
        while not registry.is_ready("s"):
            await registry.wait_change()
        assert _state(registry) == (1, AVAILABLE, "OK")
        assert [servable.spec.name for servable in loader.opened] == ["m", "s"]


@pytest.mark.parametrize("removed", ["configuration", "files"])
async def test_a_pipeline_fails_with_its_model_and_heals_with_it(
    tmp_path: Path, removed: str, checking: _CheckingLoader
) -> None:
    registry = checking.registry
    model, spec = _model(tmp_path, 1, 2, version_policy=AllVersions()), _pipeline(tmp_path, "m", version=1)
    await registry.apply([model, spec])
    if removed == "files":
        shutil.rmtree(tmp_path / "m/1")
    result = await (registry.rescan() if removed == "files" else registry.apply([spec]))
    assert [(status.name, status.error_code) for status in result.failures] == [("s", "FAILED_PRECONDITION")]
    assert _state(registry) == (1, AVAILABLE, "FAILED_PRECONDITION")
    assert checking.open_versions.count(("s", 1)) == 1
    add_versions(model.base_path, 1)
    assert (await registry.apply([model, spec])).failures == ()
    assert _state(registry) == (1, AVAILABLE, "OK")


async def test_a_model_retires_after_its_pipeline_has_been_reloaded_without_it(
    tmp_path: Path, checking: _CheckingLoader
) -> None:
    registry = checking.registry
    await registry.apply([_model(tmp_path, 1), _model(tmp_path, 1, name="n"), _pipeline(tmp_path, "m")])
    result = await registry.apply([_model(tmp_path, 1, name="n"), _pipeline(tmp_path, "n")])
    assert result.failures == ()
    assert _state(registry) == (1, AVAILABLE, "OK")
    with pytest.raises(VersionRetired):
        registry.peek("m", "1")


# Order of loading and closing, and circular and missing dependencies


async def test_a_pipeline_that_calls_a_graph_loads_right_after_the_graph(
    tmp_path: Path, checking: _CheckingLoader, autojump_clock: trio.testing.MockClock
) -> None:
    checking.seconds, registry = 1, checking.registry
    started = trio.current_time()
    specs = [_pipeline(tmp_path, "g", name="p"), graph_calling(tmp_path, "m"), _model(tmp_path, 1, name="m")]
    result = await registry.apply(specs)
    assert trio.current_time() - started <= 3 * 1.2
    assert (result.failures, registry.readiness.ready) == ((), True)
    assert [servable.spec.name for servable in checking.opened] == ["m", "g", "p"]


async def test_a_missing_dependency_fails_its_callers_at_once(
    tmp_path: Path, checking: _CheckingLoader, autojump_clock: trio.testing.MockClock
) -> None:
    checking.seconds, registry = 1, checking.registry
    checking.fail("g", 1)
    specs = [
        _pipeline(tmp_path, "missing", name="p"),
        _pipeline(tmp_path, "g", name="q"),
        _model(tmp_path, 1, name="m"),
    ]
    started = trio.current_time()
    result = await registry.apply([*specs, graph_calling(tmp_path, "m")])
    assert trio.current_time() - started <= 3
    assert [failure.name for failure in result.failures] == ["g", "p", "q"]
    assert registry.is_ready("m")


def _independent_services(root: Path) -> list[ServableSpec]:
    pipelines, models = (
        (_pipeline(root, name="p"), _pipeline(root, name="q")),
        (_model(root, 1, name="m"), _model(root, 1, name="n")),
    )
    return [*pipelines, graph_calling(root, name="g"), graph_calling(root, name="h"), *models]


def _versions_of_a_model(root: Path) -> list[ServableSpec]:
    return [ModelSpec(name="m", base_path=add_versions(root / "m", *range(1, 7)), version_policy=AllVersions())]


@pytest.mark.parametrize("make_specs", [_independent_services, _versions_of_a_model])
async def test_independent_loads_run_concurrently_up_to_the_limit(
    tmp_path: Path, make_specs: Callable[[Path], list[ServableSpec]], loader: StubLoader
) -> None:
    specs = make_specs(tmp_path)
    gates = [loader.hold(spec.name, version) for spec in specs for version in range(1, 7)]
    async with running(registry_of(loader, poll_seconds=0, concurrent_loads=3)) as registry:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(registry.apply, specs)
            await loader.wait_attempts(3)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert loader.at_once == 3
            for gate in gates:
                gate.set()
        assert (len(loader.opened), loader.most_at_once) == (6, 3)


def _write_callers(root: Path, **called: str) -> Path:
    """Write pipelines p, q, ... and graphs g, h, ..., each with the service that it calls."""
    pipelines = [dag_entry(name, callee, ("x", "x"), ("y", "y")) for name, callee in called.items() if name != "g"]
    graphs = [{"name": name, "base_path": ".", "graph_path": f"{name}.pbtxt"} for name in called if name == "g"]
    for graph in graphs:
        graph_calling(root, called[graph["name"]], name=graph["name"])
    config = root / "config.json"
    document = {"model_config_list": [], "mediapipe_config_list": graphs, "pipeline_config_list": pipelines}
    config.write_text(json.dumps(document, indent=1))
    return config


def _circles_of(registry: Registry, name: str) -> list[Problem]:
    return [problem for problem in registry.findings() if f": {name} -> " in problem.message]


async def test_only_the_members_of_a_circle_of_pipelines_are_refused(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    config = _write_callers(tmp_path, a="b", b="c", c="b", d="m", e="d", f="e")
    spec = parse_config(KINDS.values(), config.read_bytes(), config)
    result = await registry.apply(spec.services)
    assert [failure.name for failure in result.failures] == ["b", "c"]
    assert [problem.message for problem in registry.findings()] == [
        "PIPELINE_CALLS_ITSELF: it calls itself through others: b -> c -> b",
        "PIPELINE_CALLS_ITSELF: it calls itself through others: c -> b -> c",
    ]
    (problem,) = _circles_of(registry, "b")
    assert f"{problem.file}:{problem.line}" == spec.services[1].origin
    assert (await registry.rescan()).changed is False
    assert loader.attempts == {(name, 1): 1 for name in "adef"}


async def test_a_circle_of_graph_and_pipeline_is_refused_until_the_graph_changes(
    tmp_path: Path, registry: Registry
) -> None:
    config = _write_callers(tmp_path, p="g", g="p", q="m")
    spec = parse_config(KINDS.values(), config.read_bytes(), config)
    result = await registry.apply(spec.services)
    assert [failure.name for failure in result.failures] == ["g", "p"]
    (of_graph,), (of_pipeline,) = _circles_of(registry, "g"), _circles_of(registry, "p")
    assert of_graph.message == "GRAPH_CALLS_ITSELF: it calls itself through others: g -> p -> g"
    assert of_pipeline.message == "PIPELINE_CALLS_ITSELF: it calls itself through others: p -> g -> p"
    origins = {service.origin for service in spec.services if service.name in "pg"}
    assert {f"{problem.file}:{problem.line}" for problem in (of_graph, of_pipeline)} == origins
    assert registry.is_ready("q")
    graph_calling(tmp_path, "q")
    assert (await registry.rescan()).failures == ()
    assert registry.readiness.ready
    assert registry.findings() == []


async def test_a_pipeline_that_calls_itself_loads_once(tmp_path: Path, loader: StubLoader, registry: Registry) -> None:
    await registry.apply([_pipeline(tmp_path, "self", name="self")])
    assert (await registry.rescan()).changed is False
    assert loader.attempts == {("self", 1): 1}


async def test_a_session_of_an_unknown_servable_is_a_warning_with_its_line(tmp_path: Path, registry: Registry) -> None:
    graph = graph_calling(tmp_path, "m", "modle")
    with capture_logs() as logs:
        result = await registry.apply([graph, _model(tmp_path, 1, name="m"), _model(tmp_path, 1, name="model")])
    assert result.failures == ()
    (problem,) = registry.findings()
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert (warning["event"], warning["kind"], warning["name"]) == ("dependency missing", "graph", graph.name)
    assert warning["problem"] == str(problem)
    session = "the session 'OpenVINOModelServerSessionCalculator_2'"
    assert problem.message == f"{session} calls 'modle', and nothing of that name is configured"
    assert (problem.file, problem.line, problem.severity) == (str(graph.graph_path), 12, "warning")
    assert problem.suggestion == "did you mean 'model'?"
    await registry.apply([graph, *(_model(tmp_path, 1, name=name) for name in ("m", "modle"))])
    assert registry.findings() == []


async def test_a_reloaded_graph_reloads_its_direct_and_indirect_callers(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    specs = [
        _pipeline(tmp_path, "p", name="outer"),
        _pipeline(tmp_path, "g", name="p"),
        _pipeline(tmp_path, name="other"),
    ]
    await registry.apply([*specs, graph_calling(tmp_path)])
    (tmp_path / "g.pbtxt").write_text("# something else")
    assert (await registry.rescan()).changed
    assert loader.attempts == {("g", 1): 2, ("p", 1): 2, ("outer", 1): 2, ("other", 1): 1}
    assert not (await registry.rescan()).changed


class _ClosingLoader(StubLoader):
    def __init__(self) -> None:
        super().__init__()
        self.closed: list[str] = []

    async def __call__(self, spec: ModelSpec, version: int, directory: Path) -> StubServable:
        servable = await super().__call__(spec, version, directory)
        close = servable.aclose

        async def aclose() -> None:
            await close()
            self.closed.append(spec.name)

        servable.aclose = aclose  # type: ignore[method-assign]
        return servable


@pytest.mark.parametrize("end", ["retired", "shut down"])
async def test_callers_close_before_their_callees(tmp_path: Path, end: str) -> None:
    loader = _ClosingLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply(
            [_model(tmp_path, 1, name="m"), graph_calling(tmp_path, "m"), _pipeline(tmp_path, "g", "m", name="p")]
        )
        if end == "retired":
            await registry.apply([])
            await trio.testing.wait_all_tasks_blocked()
            assert loader.closed == ["p", "g", "m"]
    assert loader.closed == ["p", "g", "m"]
    assert loader.misuse == []


async def test_a_retired_model_stays_open_until_its_pipeline_is_closed(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    await registry.apply([_model(tmp_path, 1), _pipeline(tmp_path, "m"), _model(tmp_path, 1, name="n")])
    with await registry.lease("s"):
        await registry.apply([])
        await trio.testing.wait_all_tasks_blocked()
        assert loader.open_versions == [("m", 1), ("s", 1)]
    await trio.testing.wait_all_tasks_blocked()
    assert loader.open_versions == []
