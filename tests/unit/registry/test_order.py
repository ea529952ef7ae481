"""The order of loading and closing by dependencies, and circular and missing dependencies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import (
    AllVersions,
    GraphSpec,
    ModelSpec,
    NodeInput,
    NodeOutput,
    PipelineNode,
    PipelineSpec,
    ServableSpec,
)
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.registry import Registry
from ovmstrio.runtimes.table import KINDS
from tests.support.graphs import graph_calling, graph_text, python_node
from tests.support.pipelines import dag_entry
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running
from tests.support.waits import WAIT_SECONDS


def _model(root: Path, name: str) -> ModelSpec:
    return ModelSpec(name=name, base_path=add_versions(root / name, 1))


def _pipeline(root: Path, name: str, *called: str) -> PipelineSpec:
    nodes = tuple(PipelineNode(name=each, model_name=each) for each in called)
    return PipelineSpec(name=name, base_path=root, inputs=(), outputs=(), nodes=nodes)


class _SlowLoader(StubLoader):
    registry: Registry

    async def __call__(self, spec: ServableSpec, version: int, directory: Path) -> StubServable:
        if isinstance(spec, PipelineSpec):
            for node in spec.nodes:
                try:
                    with await self.registry.lease(node.model_name):
                        pass
                except ServerError as error:
                    raise ConfigError([Problem(f"{node.model_name} cannot be called", path="nodes")]) from error
        servable = await super().__call__(spec, version, directory)  # type: ignore[arg-type]
        await trio.sleep(1)
        return servable


@pytest.fixture
def slow() -> _SlowLoader:
    loader = _SlowLoader()
    loader.registry = registry_of(loader, poll_seconds=0)
    return loader


async def test_a_pipeline_that_calls_a_graph_loads_right_after_the_graph(
    tmp_path: Path, slow: _SlowLoader, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(slow.registry) as registry:
        started = trio.current_time()
        specs = [_pipeline(tmp_path, "p", "g"), graph_calling(tmp_path, "m"), _model(tmp_path, "m")]
        result = await registry.apply(specs)
        assert trio.current_time() - started <= 3 * 1.2
        assert (result.failures, registry.readiness.ready) == ((), True)
        assert [servable.spec.name for servable in slow.opened] == ["m", "g", "p"]


async def test_a_missing_dependency_fails_its_callers_at_once(
    tmp_path: Path, slow: _SlowLoader, autojump_clock: trio.testing.MockClock
) -> None:
    slow.fail("g", 1)
    specs = [_pipeline(tmp_path, "p", "missing"), _pipeline(tmp_path, "q", "g"), _model(tmp_path, "m")]
    async with running(slow.registry) as registry:
        started = trio.current_time()
        result = await registry.apply([*specs, graph_calling(tmp_path, "m")])
        assert trio.current_time() - started <= 3
        assert [failure.name for failure in result.failures] == ["g", "p", "q"]
        assert registry.is_ready("m")


def _independent_services(root: Path) -> list[ServableSpec]:
    pipelines, models = (_pipeline(root, "p"), _pipeline(root, "q")), (_model(root, "m"), _model(root, "n"))
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


def _write_config(root: Path, **called: str) -> Path:
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
    config = _write_config(tmp_path, a="b", b="c", c="b", d="m", e="d", f="e")
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
    config = _write_config(tmp_path, p="g", g="p", q="m")
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
    await registry.apply([_pipeline(tmp_path, "self", "self")])
    assert (await registry.rescan()).changed is False
    assert loader.attempts == {("self", 1): 1}


async def test_a_session_of_an_unknown_servable_is_a_warning_with_its_line(tmp_path: Path, registry: Registry) -> None:
    graph = graph_calling(tmp_path, "m", "modle")
    assert (await registry.apply([graph, _model(tmp_path, "m"), _model(tmp_path, "model")])).failures == ()
    (problem,) = registry.findings()
    session = "the session 'OpenVINOModelServerSessionCalculator_2'"
    assert problem.message == f"{session} calls 'modle', and nothing of that name is configured"
    assert (problem.file, problem.line, problem.severity) == (str(graph.graph_path), 12, "warning")
    assert problem.suggestion == "did you mean 'model'?"
    await registry.apply([graph, *(_model(tmp_path, name) for name in ("m", "modle"))])
    assert registry.findings() == []


async def test_a_reloaded_graph_reloads_its_direct_and_indirect_callers(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    specs = [_pipeline(tmp_path, "outer", "p"), _pipeline(tmp_path, "p", "g"), _pipeline(tmp_path, "other")]
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
async def test_callers_close_before_what_they_call(tmp_path: Path, end: str) -> None:
    loader = _ClosingLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_model(tmp_path, "m"), graph_calling(tmp_path, "m"), _pipeline(tmp_path, "p", "g", "m")])
        if end == "retired":
            await registry.apply([])
            await trio.testing.wait_all_tasks_blocked()
            assert loader.closed == ["p", "g", "m"]
    assert loader.closed == ["p", "g", "m"]
    assert loader.misuse == []


async def test_a_retired_model_stays_open_until_its_pipeline_is_closed(tmp_path: Path) -> None:
    loader = _ClosingLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_model(tmp_path, "m"), _pipeline(tmp_path, "p", "m"), _model(tmp_path, "n")])
        with await registry.lease("p"):
            await registry.apply([])
            await trio.testing.wait_all_tasks_blocked()
            assert loader.closed == ["n"]
        await trio.testing.wait_all_tasks_blocked()
        assert loader.closed == ["n", "p", "m"]


async def test_a_real_pipeline_of_a_graph_is_ready_after_the_first_pass(tmp_path: Path) -> None:
    code = "from pyovms import Tensor\nclass OvmsPythonModel:\n    def execute(self, inputs): return inputs\n"
    (tmp_path / "node.py").write_text(code)
    (tmp_path / "graph.pbtxt").write_text(graph_text(python_node("node.py")))
    graph = GraphSpec(name="g", base_path=tmp_path, graph_path=tmp_path / "graph.pbtxt")
    request = NodeInput(name="in", node="request", data_item="in")
    output = NodeOutput(data_item="out", alias="out")
    node = PipelineNode(name="n", model_name="g", inputs=(request,), outputs=(output,))
    answer = NodeInput(name="out", node="n", data_item="out")
    pipeline = PipelineSpec(name="p", base_path=tmp_path, inputs=("in",), outputs=(answer,), nodes=(node,))
    with trio.fail_after(WAIT_SECONDS):
        async with running(Registry(KINDS, poll_seconds=0, load_wait_seconds=600)) as registry:
            assert (await registry.apply([pipeline, graph])).failures == ()
            assert registry.readiness.ready
