"""Pipelines in the registry: one version, texts of their own, and reloads when their libraries or models change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.api.kserve.repository_index import repository_index
from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import (
    AllVersions,
    ModelSpec,
    PipelineNode,
    PipelineSpec,
    ServableSpec,
)
from ovmstrio.core.errors import ModelFailure, NotFound, Problem, ServiceLoading, VersionRetired
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.registry import Registry, VersionState
from ovmstrio.registry.source import ConfigSource
from ovmstrio.runtimes.table import KINDS
from tests.support.called_graphs import graph_calling
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running


def _pipeline(root: Path, *models: str, version: int = 0, library: str = "", **settings: Any) -> PipelineSpec:
    nodes = [PipelineNode(name=name, model_name=name, version=version) for name in models]
    if library:
        nodes.append(PipelineNode(name="custom", library="l"))
        settings["libraries"] = {"l": root / library}
    fields: dict[str, Any] = {"name": "p", "inputs": (), "outputs": (), **settings}
    return PipelineSpec(base_path=root, nodes=tuple(nodes), **fields)


def _model(root: Path, *versions: int, name: str = "m", **settings: Any) -> ModelSpec:
    return ModelSpec(name=name, base_path=add_versions(root / name, *versions), **settings)


class _CheckingLoader(StubLoader):
    """Loads a pipeline only if the versions that it calls can be leased, as real ones are loaded."""

    registry: Registry

    async def __call__(self, spec: ServableSpec, version: int, directory: Path) -> StubServable:
        """Load one version."""
        if isinstance(spec, PipelineSpec):
            for node in spec.nodes:
                if node.model_name:
                    with await self.registry.lease(node.model_name, str(node.version)):
                        pass
        return await super().__call__(spec, version, directory)  # type: ignore[arg-type]


def _checking(**options: Any) -> tuple[_CheckingLoader, Registry]:
    loader = _CheckingLoader()
    loader.registry = registry_of(loader, **{"poll_seconds": 0, **options})
    return loader, loader.registry


def _state(registry: Registry) -> tuple[int, VersionState, str]:
    (status,) = registry.statuses()["p"]
    assert status.kind == "pipeline"
    return status.version, status.state, status.error_code


async def test_a_pipeline_answers_whatever_version_is_asked_for(tmp_path: Path) -> None:
    """It has the one version 1, like a graph."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_pipeline(tmp_path)])
        for version in ("", "0", "1", "7"):
            with await registry.lease("p", version) as lease:
                assert (lease.name, lease.version) == ("p", "1")
        assert registry.available_versions("p") == [1]


async def test_what_is_called_comes_before_those_that_call_it(tmp_path: Path) -> None:
    """A model before its pipeline, that one before its graph; meanwhile the others are known as loading."""
    loader = StubLoader()
    gate = loader.hold("p", 1)
    graph = graph_calling(tmp_path, "p")
    async with running(registry_of(loader, poll_seconds=0)) as registry, trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [graph, _pipeline(tmp_path, "m"), _model(tmp_path, 1)])
        await loader.begun["p", 1].wait()
        assert [servable.spec.name for servable in loader.opened] == ["m"]
        assert loader.attempts["g", 1] == 0
        assert _state(registry) == (1, VersionState.LOADING, "OK")
        assert registry.readiness.reason == "loading 2 of 3 models, pipelines and graphs: g, p"
        gate.set()
        await registry.wait_loaded()
        assert [servable.spec.name for servable in loader.opened] == ["m", "p", "g"]


async def test_a_pipeline_that_fails_says_why(tmp_path: Path) -> None:
    """Its state, its refusal and the readiness hold the reason."""
    loader = StubLoader()
    loader.fail("p", 1)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        result = await registry.apply([_pipeline(tmp_path)])
        assert [(status.kind, status.name) for status in result.failures] == [("pipeline", "p")]
        assert _state(registry) == (1, VersionState.LOADING, "FAILED_PRECONDITION")
        with pytest.raises(ServiceLoading) as caught:
            await registry.lease("p", "4")
        assert caught.value.message == 'pipeline "p" is not loaded yet: its last load failed: the stub was told to fail'
        assert registry.readiness.reason == 'pipeline "p": version 1: the stub was told to fail'
        assert [(entry.name, entry.state) for entry in repository_index(DataPlane(registry))] == [("p", "LOADING")]


async def test_a_call_waits_for_a_pipeline_that_is_being_loaded(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Within the bound, after which it is refused in OVMS's words."""
    loader = StubLoader()
    gate = loader.hold("p", 1)
    registry = registry_of(loader, poll_seconds=0, load_wait_seconds=5)
    async with running(registry), trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_pipeline(tmp_path)])
        await loader.begun["p", 1].wait()
        with pytest.raises(ServiceLoading, match=r'^pipeline "p" is not loaded yet$'):
            await registry.lease("p")
        gate.set()
        with await registry.lease("p") as lease:
            assert lease.version == "1"


async def test_a_retired_pipeline_says_so(tmp_path: Path) -> None:
    """It is listed as ended, and comes back when it is configured again."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_pipeline(tmp_path)])
        await registry.apply([])
        with pytest.raises(VersionRetired, match=r'^pipeline "p" is retired$'):
            await registry.lease("p")
        await trio.testing.wait_all_tasks_blocked()
        assert _state(registry) == (1, VersionState.END, "OK")
        await registry.apply([_pipeline(tmp_path)])
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")


async def test_wrong_settings_fail_a_pipeline_without_loading_it(tmp_path: Path) -> None:
    """An unknown library is such a setting."""
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_pipeline(tmp_path, problems=(Problem("there is no custom node library 'l'"),))])
        assert _state(registry) == (1, VersionState.LOADING, "FAILED_PRECONDITION")
        assert loader.attempts["p", 1] == 0
        await registry.apply([_pipeline(tmp_path)])
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")


def _write_helper(root: Path) -> None:
    (root / "helper.py").write_text("")


@pytest.mark.parametrize("library", ["l.so", "l.py"])
async def test_a_library_that_changes_loads_its_pipelines_again(tmp_path: Path, library: str) -> None:
    """Written, gone or back; pipelines without it stay as they are."""
    loader = StubLoader()
    file = tmp_path / library
    file.write_text("1")
    specs = [_pipeline(tmp_path, library=library), _pipeline(tmp_path, name="other")]
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply(specs)
        assert (await registry.rescan()).changed is False
        changes: list[Callable[[], object]] = [lambda: file.write_text("22"), file.unlink, file.touch]
        for attempt, change in enumerate(changes, start=2):
            change()
            assert (await registry.rescan()).changed is True
            assert loader.attempts["p", 1] == attempt
        _write_helper(tmp_path)
        assert (await registry.rescan()).changed is (library == "l.py")
        assert loader.attempts["other", 1] == 1


async def test_a_built_in_library_has_no_file_to_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the working directory under its name is something else."""
    monkeypatch.chdir(tmp_path)
    spec = _pipeline(tmp_path, library="x").model_copy(update={"libraries": {"l": Path("add_one")}})
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([spec])
        (tmp_path / "add_one").touch()
        assert (await registry.rescan()).changed is False


async def test_a_model_that_is_loaded_again_has_its_pipelines_validated_again(tmp_path: Path) -> None:
    """In the same pass, once; others are left alone."""
    loader, registry = _checking()
    other = _pipeline(tmp_path, "n", name="other")
    async with running(registry):
        await registry.apply([_model(tmp_path, 1), _model(tmp_path, 1, name="n"), _pipeline(tmp_path, "m"), other])
        result = await registry.apply(
            [_model(tmp_path, 1, nireq=2), _model(tmp_path, 1, name="n"), _pipeline(tmp_path, "m"), other]
        )
        assert (result.changed, result.failures) == (True, ())
        assert loader.attempts == {("m", 1): 2, ("n", 1): 1, ("p", 1): 2, ("other", 1): 1}
        assert (await registry.rescan()).changed is False


@pytest.mark.parametrize(("version", "attempts"), [(0, 2), (1, 1)])
async def test_a_new_default_version_concerns_who_calls_the_default(
    tmp_path: Path, version: int, attempts: int
) -> None:
    """A pipeline that names its version is left alone."""
    loader, registry = _checking()
    model = _model(tmp_path, 1, version_policy=AllVersions())
    async with running(registry):
        await registry.apply([model, _pipeline(tmp_path, "m", version=version)])
        add_versions(model.base_path, 2)
        await registry.rescan()
        assert registry.available_versions("m") == [1, 2]
        assert loader.attempts["p", 1] == attempts


async def test_a_pipeline_heals_when_its_model_appears(tmp_path: Path) -> None:
    """The watcher loads it right after the model."""
    loader, registry = _checking(poll_seconds=0.01)
    model = _model(tmp_path)
    async with running(registry):
        await registry.apply([model, _pipeline(tmp_path, "m")])
        assert _state(registry) == (1, VersionState.LOADING, "FAILED_PRECONDITION")
        add_versions(model.base_path, 1)
        while not registry.is_ready("p"):
            await registry.wait_change()
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")
        assert [servable.spec.name for servable in loader.opened] == ["m", "p"]


@pytest.mark.parametrize("how", ["configuration", "files"])
async def test_a_pipeline_whose_model_goes_says_so_and_heals(tmp_path: Path, how: str) -> None:
    """In the same pass; what was loaded is kept, and is validated again when the model is back."""
    loader, registry = _checking()
    model, spec = _model(tmp_path, 1, 2, version_policy=AllVersions()), _pipeline(tmp_path, "m", version=1)
    async with running(registry):
        await registry.apply([model, spec])
        if how == "files":
            shutil.rmtree(tmp_path / "m/1")
            result = await registry.rescan()
        else:
            result = await registry.apply([spec])
        assert [(status.name, status.error_code) for status in result.failures] == [("p", "FAILED_PRECONDITION")]
        assert _state(registry) == (1, VersionState.AVAILABLE, "FAILED_PRECONDITION")
        assert loader.open_versions.count(("p", 1)) == 1
        add_versions(model.base_path, 1)
        assert (await registry.apply([model, spec])).failures == ()
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")
    assert loader.misuse == []


async def test_a_pipeline_that_leaves_a_model_goes_on_when_the_model_goes(tmp_path: Path) -> None:
    """The model is retired only after the pipeline has been loaded without it."""
    registry = _checking()[1]
    async with running(registry):
        await registry.apply([_model(tmp_path, 1), _model(tmp_path, 1, name="n"), _pipeline(tmp_path, "m")])
        result = await registry.apply([_model(tmp_path, 1, name="n"), _pipeline(tmp_path, "n")])
        assert result.failures == ()
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")
        with pytest.raises(VersionRetired):
            registry.peek("m", "1")


async def test_a_pipeline_that_calls_itself_is_loaded_no_more_than_once(tmp_path: Path) -> None:
    """Its own load is no reason for another one; of two that call each other neither is loaded."""
    loader = StubLoader()
    circle = [_pipeline(tmp_path, "q", name="p"), _pipeline(tmp_path, "p", name="q")]
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_pipeline(tmp_path, "self", name="self"), *circle])
        assert (await registry.rescan()).changed is False
        assert loader.attempts == {("self", 1): 1}


async def test_a_name_may_change_from_model_to_pipeline_and_back(tmp_path: Path) -> None:
    """Versions and texts are those of what the name stands for now."""
    loader = StubLoader()
    model = _model(tmp_path, 1, 2, name="p")
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([model])
        await registry.apply([_pipeline(tmp_path)])
        with await registry.lease("p", "2") as lease:
            assert lease.version == "1"
        await registry.apply([model])
        with pytest.raises(VersionRetired, match=r"of model .* is retired"):
            await registry.lease("p", "1")
        await trio.testing.wait_all_tasks_blocked()
        assert loader.open_versions == [("p", 2)]


async def test_an_edit_of_the_file_that_only_moves_a_pipeline_loads_nothing(tmp_path: Path) -> None:
    """Lines are for messages; a failure names the pipeline."""
    node = {
        "name": "n",
        "type": "DL model",
        "model_name": "m",
        "inputs": [{"a": {"node_name": "request", "data_item": "a"}}],
        "outputs": [{"data_item": "b", "alias": "b"}],
    }
    pipeline = {
        "name": "p",
        "inputs": ["a"],
        "outputs": [{"b": {"node_name": "n", "data_item": "b"}}],
        "nodes": [node],
    }
    document = {"model_config_list": [], "pipeline_config_list": [pipeline]}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(document))
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        source = ConfigSource(config, registry, partial(parse_config, KINDS.values()))
        await source.reload()
        config.write_text(json.dumps(document, indent=3))
        await source.reload()
        assert loader.attempts["p", 1] == 1
        loader.fail("p", 1)
        config.write_text(json.dumps({**document, "pipeline_config_list": [{**pipeline, "inputs": ["c"]}]}))
        with pytest.raises(ModelFailure, match=r'^pipeline "p": the stub was told to fail'):
            await source.reload()


async def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    """At once, with the name."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_pipeline(tmp_path)])
        with pytest.raises(NotFound, match='nothing is served under the name "q"'):
            await registry.lease("q")
