"""What is loaded before what, whatever its kind: dependencies, circles, names that nothing has, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import (
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
from tests.support.called_graphs import graph_calling
from tests.support.graphs import graph_text, python_node
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running
from tests.support.waits import WAIT_SECONDS


def _model(root: Path, name: str) -> ModelSpec:
    return ModelSpec(name=name, base_path=add_versions(root / name, 1))


def _pipeline(root: Path, name: str, *called: str, origin: str = "") -> PipelineSpec:
    nodes = tuple(PipelineNode(name=each, model_name=each) for each in called)
    return PipelineSpec(name=name, base_path=root, inputs=(), outputs=(), nodes=nodes, origin=origin)


class _SlowLoader(StubLoader):
    """Takes a second for each load, and looks for what pipelines call as real ones do."""

    registry: Registry

    async def __call__(self, spec: ServableSpec, version: int, directory: Path) -> StubServable:
        """Load one version."""
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


def _slow(**options: Any) -> tuple[_SlowLoader, Registry]:
    loader = _SlowLoader()
    loader.registry = registry_of(loader, poll_seconds=0, **options)
    return loader, loader.registry


async def test_a_pipeline_that_calls_a_graph_is_loaded_as_soon_as_the_graph_is(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """No later than the loads take, one after the other, and ready at once."""
    loader, registry = _slow()
    specs = [_pipeline(tmp_path, "p", "g"), graph_calling(tmp_path, "m"), _model(tmp_path, "m")]
    async with running(registry):
        started = trio.current_time()
        result = await registry.apply(specs)
        assert trio.current_time() - started <= 3 * 1.2
        assert (result.failures, registry.readiness.ready) == ((), True)
        assert [servable.spec.name for servable in loader.opened] == ["m", "g", "p"]


class _MeetingLoader(StubLoader):
    """Lets no load end before so many are under way."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._loading = 0
        self._met = trio.Event()
        self.most = 0

    async def __call__(self, spec: ServableSpec, version: int, directory: Path) -> StubServable:
        """Load one version."""
        met = self._met
        self._loading += 1
        self.most = max(self.most, self._loading)
        if self._loading == self._count:
            met.set()
            self._met = trio.Event()
        await met.wait()
        self._loading -= 1
        return await super().__call__(spec, version, directory)  # type: ignore[arg-type]


async def test_what_depends_on_nothing_is_loaded_side_by_side(tmp_path: Path) -> None:
    """Whatever its kind, as far as the bound goes."""
    loader = _MeetingLoader(3)
    specs: list[ServableSpec] = [_pipeline(tmp_path, name) for name in ("p", "q")]
    specs += [graph_calling(tmp_path, name=name) for name in ("g", "h")] + [_model(tmp_path, name) for name in "mn"]
    async with running(registry_of(loader, poll_seconds=0, concurrent_loads=3)) as registry:
        with trio.fail_after(60):
            await registry.apply(specs)
        assert (len(loader.opened), loader.most) == (6, 3)


async def test_a_dependency_that_is_not_there_fails_what_needs_it_at_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Not configured or not loaded: nobody waits for it, and everything else serves."""
    loader, registry = _slow()
    loader.fail("g", 1)
    specs = [_pipeline(tmp_path, "p", "nobody"), _pipeline(tmp_path, "q", "g"), _model(tmp_path, "m")]
    async with running(registry):
        started = trio.current_time()
        result = await registry.apply([*specs, graph_calling(tmp_path, "m")])
        assert trio.current_time() - started <= 3
        assert [failure.name for failure in result.failures] == ["g", "p", "q"]
        assert registry.is_ready("m")


def _configuration(root: Path, **called: str) -> Path:
    """Write pipelines p, q ... and graphs g, h ... with what each calls."""
    given = [{"x": {"node_name": "request", "data_item": "x"}}]
    taken = [{"y": {"node_name": "n", "data_item": "y"}}]
    pipelines = [
        {
            "name": name,
            "inputs": ["x"],
            "nodes": [
                {
                    "name": "n",
                    "type": "DL model",
                    "model_name": callee,
                    "inputs": given,
                    "outputs": [{"data_item": "y", "alias": "y"}],
                }
            ],
            "outputs": taken,
        }
        for name, callee in called.items()
        if not name.startswith("g")
    ]
    graphs = [{"name": name, "base_path": ".", "graph_path": f"{name}.pbtxt"} for name in called if name[0] == "g"]
    for graph in graphs:
        graph_calling(root, called[graph["name"]], name=graph["name"])
    config = root / "config.json"
    document = {"model_config_list": [], "mediapipe_config_list": graphs, "pipeline_config_list": pipelines}
    config.write_text(json.dumps(document, indent=1))
    return config


def _told(registry: Registry, name: str) -> list[Problem]:
    return [problem for problem in registry.findings() if f": {name} -> " in problem.message]


async def test_pipelines_that_call_each_other_in_a_circle_are_refused(tmp_path: Path) -> None:
    """Each of the circle says how; those that lead into it, and what is called twice without one, do not."""
    config = _configuration(tmp_path, a="b", b="c", c="b", d="m", e="d", f="e")
    spec = parse_config(KINDS.values(), config.read_bytes(), config)
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        result = await registry.apply(spec.services)
        assert [failure.name for failure in result.failures] == ["b", "c"]
        assert [problem.message for problem in registry.findings()] == [
            "PIPELINE_CALLS_ITSELF: it calls itself through others: b -> c -> b",
            "PIPELINE_CALLS_ITSELF: it calls itself through others: c -> b -> c",
        ]
        (problem,) = _told(registry, "b")
        assert f"{problem.file}:{problem.line}" == spec.services[1].origin
        assert sorted(loader.attempts) == [(name, 1) for name in "adef"]


async def test_a_circle_of_several_kinds_is_refused_with_its_members(tmp_path: Path) -> None:
    """A graph that calls a pipeline that calls the graph; it heals as soon as the graph calls something else."""
    config = _configuration(tmp_path, p="g", g="p", q="m")
    spec = parse_config(KINDS.values(), config.read_bytes(), config)
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        result = await registry.apply(spec.services)
        assert [failure.name for failure in result.failures] == ["g", "p"]
        (of_graph,), (of_pipeline,) = _told(registry, "g"), _told(registry, "p")
        assert of_graph.message == "GRAPH_CALLS_ITSELF: it calls itself through others: g -> p -> g"
        assert of_pipeline.message == "PIPELINE_CALLS_ITSELF: it calls itself through others: p -> g -> p"
        assert {f"{each.file}:{each.line}" for each in (of_graph, of_pipeline)} == {
            service.origin for service in spec.services if service.name in "pg"
        }
        assert registry.is_ready("q")
        graph_calling(tmp_path, "q")
        assert (await registry.rescan()).failures == ()
        assert registry.readiness.ready
        assert registry.findings() == []


async def test_a_session_whose_servable_is_nowhere_is_a_warning_with_its_line(tmp_path: Path) -> None:
    """The graph is loaded, for the servable may come; then nothing is told any more."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        graph = graph_calling(tmp_path, "m", "modle")
        assert (await registry.apply([graph, _model(tmp_path, "m"), _model(tmp_path, "model")])).failures == ()
        (problem,) = registry.findings()
        expected = (
            "the session 'OpenVINOModelServerSessionCalculator_2' calls 'modle', and nothing of that name is configured"
        )
        assert problem.message == expected
        assert (problem.file, problem.line, problem.severity) == (str(graph.graph_path), 12, "warning")
        assert problem.suggestion == "did you mean 'model'?"
        await registry.apply([graph, *(_model(tmp_path, name) for name in ("m", "modle"))])
        assert registry.findings() == []


async def test_a_graph_that_is_loaded_again_has_its_pipelines_loaded_again(tmp_path: Path) -> None:
    """In the same pass, and what calls those as well."""
    loader = StubLoader()
    specs = [_pipeline(tmp_path, "outer", "p"), _pipeline(tmp_path, "p", "g"), _pipeline(tmp_path, "other")]
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([*specs, graph_calling(tmp_path)])
        (tmp_path / "g.pbtxt").write_text("# something else")
        assert (await registry.rescan()).changed
        assert loader.attempts == {("g", 1): 2, ("p", 1): 2, ("outer", 1): 2, ("other", 1): 1}
        assert not (await registry.rescan()).changed


class _ClosingLoader(StubLoader):
    """Remembers in which order servables were closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: list[str] = []

    async def __call__(self, spec: Any, version: int, directory: Path) -> StubServable:
        """Load one version."""
        servable = await super().__call__(spec, version, directory)
        close = servable.aclose

        async def aclose() -> None:
            await close()
            self.closed.append(spec.name)

        servable.aclose = aclose  # type: ignore[method-assign]
        return servable


@pytest.mark.parametrize("how", ["retired", "shut down"])
async def test_what_is_called_goes_after_those_that_call_it(tmp_path: Path, how: str) -> None:
    """When all of it is taken out of the configuration, and when the registry ends."""
    loader = _ClosingLoader()
    specs = [_model(tmp_path, "m"), graph_calling(tmp_path, "m"), _pipeline(tmp_path, "p", "g", "m")]
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply(specs)
        if how == "retired":
            await registry.apply([])
            await trio.testing.wait_all_tasks_blocked()
            assert loader.closed == ["p", "g", "m"]
    assert loader.closed == ["p", "g", "m"]
    assert loader.misuse == []


async def test_a_call_in_flight_holds_up_the_end_of_what_it_calls(tmp_path: Path) -> None:
    """The model of a pipeline that is retired stays open until the pipeline is closed."""
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
    """However long calls may wait for what is being loaded."""
    folder = tmp_path / "g"
    folder.mkdir()
    (folder / "graph.pbtxt").write_text(graph_text(python_node("node.py")))
    code = "from pyovms import Tensor\nclass OvmsPythonModel:\n    def execute(self, inputs): return inputs\n"
    (folder / "node.py").write_text(code)
    graph = GraphSpec(name="g", base_path=folder, graph_path=folder / "graph.pbtxt")
    request = NodeInput(name="in", node="request", data_item="in")
    output = NodeOutput(data_item="out", alias="out")
    node = PipelineNode(name="n", model_name="g", inputs=(request,), outputs=(output,))
    answer = NodeInput(name="out", node="n", data_item="out")
    pipeline = PipelineSpec(name="p", base_path=tmp_path, inputs=("in",), outputs=(answer,), nodes=(node,))
    with trio.fail_after(WAIT_SECONDS):
        async with running(Registry(KINDS, poll_seconds=0, load_wait_seconds=600)) as registry:
            assert (await registry.apply([pipeline, graph])).failures == ()
            assert registry.readiness.ready
