"""Graphs in the registry: one version, texts of their own, and reloads when their files change."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.api.kserve.repository_index import repository_index
from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import GraphSpec, ModelSpec
from ovmstrio.core.errors import InvalidRequest, ModelFailure, NotFound, Problem, ServiceLoading, VersionRetired
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.registry import Registry, VersionState
from ovmstrio.registry.source import ConfigSource
from ovmstrio.runtimes.table import KINDS
from tests.support.called_graphs import graph_calling
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running


def _graph(root: Path, *problems: Problem, name: str = "g") -> GraphSpec:
    path = root / "graph.pbtxt"
    if not path.exists():
        path.write_text('handler_path: "handler.py"')
        (root / "handler.py").write_text("pass")
    return GraphSpec(name=name, base_path=root, graph_path=path, problems=problems)


def _state(registry: Registry) -> tuple[int, VersionState, str]:
    (status,) = registry.statuses()["g"]
    return status.version, status.state, status.error_code


async def test_a_graph_answers_whatever_version_is_asked_for(tmp_path: Path) -> None:
    """It has one, and a version that is no number is refused as ever."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_graph(tmp_path)])
        for version in ("", "0", "1", "7", "-3"):
            with await registry.lease("g", version) as lease:
                assert (lease.name, lease.version) == ("g", "1")
            assert registry.peek("g", version) is lease.servable
            assert registry.is_ready("g", version)
        for call in (registry.peek, registry.is_ready):
            with pytest.raises(InvalidRequest, match="must be an integer"):
                call("g", "one")
        with pytest.raises(InvalidRequest, match="must be an integer"):
            await registry.lease("g", "one")
        assert registry.available_versions("g") == [1]


async def test_a_call_waits_for_a_graph_that_is_being_loaded(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """As for a model, within the bound."""
    loader = StubLoader()
    gate = loader.hold("g", 1)
    registry = registry_of(loader, poll_seconds=0, load_wait_seconds=5)
    async with running(registry), trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_graph(tmp_path)])
        await loader.begun["g", 1].wait()
        assert _state(registry) == (1, VersionState.LOADING, "OK")
        assert not registry.is_ready("g")
        assert registry.readiness.reason == "loading 1 of 1 graphs: g"
        started = trio.current_time()
        with pytest.raises(ServiceLoading, match=r'^graph "g" is not loaded yet$'):
            await registry.lease("g", "3")
        assert trio.current_time() - started == 5
        gate.set()
        with await registry.lease("g") as lease:
            assert lease.version == "1"


async def test_a_graph_is_known_while_the_models_before_it_load(tmp_path: Path) -> None:
    """It is loading, though its own load has not begun; the model that it calls comes first, and waits for none."""
    loader = StubLoader()
    gate = loader.hold("m", 1)
    model = ModelSpec(name="m", base_path=add_versions(tmp_path / "m", 1))
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(registry.apply, [graph_calling(tmp_path, "m"), model])
            await loader.begun["m", 1].wait()
            await trio.testing.wait_all_tasks_blocked()
            assert _state(registry) == (1, VersionState.LOADING, "OK")
            assert loader.attempts["g", 1] == 0
            assert registry.readiness.reason == "loading 2 of 2 models and graphs: g, m"
            gate.set()
        assert [servable.spec.name for servable in loader.opened] == ["m", "g"]


async def test_a_graph_that_fails_says_why_and_is_no_reason_to_wait(tmp_path: Path) -> None:
    """Its state, its refusal and the readiness hold the reason; other servables are served."""
    loader = StubLoader()
    loader.fail("g", 1)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        result = await registry.apply([_graph(tmp_path), _graph(tmp_path, name="other")])
        assert [status.name for status in result.failures] == ["g"]
        assert _state(registry) == (1, VersionState.LOADING, "FAILED_PRECONDITION")
        text = 'graph "g" is not loaded yet: its last load failed: the stub was told to fail'
        for version in ("", "4"):
            with pytest.raises(ServiceLoading) as caught:
                await registry.lease("g", version)
            assert caught.value.message == text
        assert registry.is_ready("g") is False
        assert registry.is_ready("other")
        assert registry.readiness.reason == 'graph "g": version 1: the stub was told to fail'
        assert [(entry.name, entry.version, entry.state) for entry in repository_index(DataPlane(registry))] == [
            ("g", "1", "LOADING"),
            ("other", "1", "READY"),
        ]


async def test_a_graph_with_wrong_settings_fails_without_being_loaded(tmp_path: Path) -> None:
    """It has its version all the same, and is served once they are mended."""
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_graph(tmp_path, Problem("no JSON", file="subconfig.json"))])
        assert _state(registry) == (1, VersionState.LOADING, "FAILED_PRECONDITION")
        assert loader.attempts["g", 1] == 0
        await registry.apply([_graph(tmp_path)])
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")
        await registry.apply([_graph(tmp_path, Problem("no JSON"))])
        assert _state(registry) == (1, VersionState.AVAILABLE, "FAILED_PRECONDITION")
        await registry.apply([_graph(tmp_path)])
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")
        assert loader.attempts["g", 1] == 1


async def test_a_retired_graph_says_so_until_it_comes_back(tmp_path: Path) -> None:
    """A stream that is open goes on with the old definition, which is closed after it."""
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_graph(tmp_path)])
        with await registry.lease("g"):
            await registry.apply([])
            assert _state(registry) == (1, VersionState.UNLOADING, "OK")
            with pytest.raises(VersionRetired, match=r'^graph "g" is retired$'):
                await registry.lease("g", "2")
            await trio.testing.wait_all_tasks_blocked()
            assert loader.opened[0].closed == 0
        await trio.testing.wait_all_tasks_blocked()
        assert _state(registry) == (1, VersionState.END, "OK")
        assert (loader.opened[0].closed, registry.is_ready("g")) == (1, False)
        await registry.apply([_graph(tmp_path)])
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")
    assert loader.misuse == []


async def test_an_unknown_name_is_refused_where_nothing_is_configured() -> None:
    """At once, with the name."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([])
        with pytest.raises(NotFound, match=r'^nothing is served under the name "g"$'):
            await registry.lease("g")


async def test_a_name_may_change_from_model_to_graph_and_back(tmp_path: Path) -> None:
    """Versions and texts are those of what the name stands for now."""
    loader = StubLoader()
    model = ModelSpec(name="g", base_path=add_versions(tmp_path / "m", 1, 2))
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([model])
        await registry.apply([_graph(tmp_path)])
        with await registry.lease("g", "2") as lease:
            assert lease.version == "1"
        await registry.apply([model])
        with await registry.lease("g") as lease:
            assert lease.version == "2"
        with pytest.raises(VersionRetired, match=r"of model .* is retired"):
            await registry.lease("g", "1")
        await trio.testing.wait_all_tasks_blocked()
        assert loader.open_versions == [("g", 2)]


def _edit_graph(root: Path) -> None:
    (root / "graph.pbtxt").write_text('handler_path: "handler.py" # changed')


def _edit_handler(root: Path) -> None:
    (root / "handler.py").write_text("changed = True")


def _add_helper(root: Path) -> None:
    (root / "helper.py").write_text("")


@pytest.mark.parametrize("edit", [_edit_graph, _edit_handler, _add_helper])
@pytest.mark.parametrize("how", ["rescan", "apply"])
async def test_a_reload_loads_a_graph_again_when_its_files_have_changed(
    tmp_path: Path, edit: Callable[[Path], None], how: str
) -> None:
    """Its own file and the Python files of its handlers count; without a change nothing is done."""
    loader = StubLoader()
    spec = _graph(tmp_path)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([spec])

        async def reload() -> bool:
            result = await (registry.rescan() if how == "rescan" else registry.apply([_graph(tmp_path)]))
            return result.changed

        assert await reload() is False
        edit(tmp_path)
        assert await reload() is True
        assert await reload() is False
        await trio.testing.wait_all_tasks_blocked()
        assert (loader.attempts["g", 1], loader.open_versions) == (2, [("g", 1)])


async def test_a_changed_place_loads_a_graph_again(tmp_path: Path) -> None:
    """The settings count as those of a model do."""
    loader = StubLoader()
    spec = _graph(tmp_path)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([spec])
        await registry.apply([spec.model_copy(update={"origin": "elsewhere:3"})])
        assert loader.attempts["g", 1] == 1
        await registry.apply([spec.model_copy(update={"subconfig": tmp_path / "s.json"})])
        assert loader.attempts["g", 1] == 2


async def test_a_file_that_changes_during_a_load_is_loaded_once_more_later(tmp_path: Path) -> None:
    """The load that is under way ends, and the next look sees the change."""
    loader = StubLoader()
    gate = loader.hold("g", 1)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(registry.apply, [_graph(tmp_path)])
            await loader.begun["g", 1].wait()
            _edit_handler(tmp_path)
            gate.set()
        assert loader.attempts["g", 1] == 1
        await registry.rescan()
        await registry.rescan()
        assert loader.attempts["g", 1] == 2


async def test_a_reload_that_fails_leaves_the_old_graph_serving(tmp_path: Path) -> None:
    """The status says why; calls notice nothing."""
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_graph(tmp_path)])
        old = registry.peek("g")
        loader.fail("g", 1)
        _edit_handler(tmp_path)
        result = await registry.rescan()
        assert [status.reason for status in result.failures] == ["the stub was told to fail"]
        assert _state(registry) == (1, VersionState.AVAILABLE, "FAILED_PRECONDITION")
        assert registry.peek("g") is old
        assert registry.readiness.ready
        loader.mend("g", 1)
        assert (await registry.rescan()).changed
        assert registry.peek("g") is not old
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(old, StubServable)
        assert old.closed == 1


async def _until(condition: Callable[[], bool], registry: Registry) -> None:
    while not condition():
        await registry.wait_change()


async def test_the_watcher_sees_edited_code_and_mended_graphs(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Who edits a handler waits for one look; a failed graph is tried again at once when its files change."""
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=1)) as registry:
        await registry.apply([_graph(tmp_path)])
        first = registry.peek("g")
        _edit_handler(tmp_path)
        await _until(lambda: registry.peek("g") is not first, registry)
        loader.fail("g", 1)
        _edit_graph(tmp_path)
        await _until(lambda: _state(registry)[2] == "FAILED_PRECONDITION", registry)
        loader.mend("g", 1)
        second, failed = registry.peek("g"), loader.attempts["g", 1]
        _add_helper(tmp_path)
        await _until(lambda: registry.peek("g") is not second, registry)
        assert loader.attempts["g", 1] >= failed + 1
        assert _state(registry) == (1, VersionState.AVAILABLE, "OK")


async def test_a_graph_that_goes_on_failing_is_tried_at_growing_intervals(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """As a model is."""
    loader = StubLoader()
    loader.fail("g", 1)
    async with running(registry_of(loader, poll_seconds=1)) as registry:
        await registry.apply([_graph(tmp_path)])
        started = trio.current_time()
        await loader.wait_attempts(4)
        assert trio.current_time() - started >= 1 + 2 + 4


async def _load(site: Path, loader: StubLoader, body: Callable[[Registry, ConfigSource], Awaitable[None]]) -> None:
    registry = registry_of(loader, poll_seconds=0)
    source = ConfigSource(site / "config.json", registry, partial(parse_config, KINDS.values()))
    async with running(registry):
        await source.reload(force=True)
        await body(registry, source)


def _configure(path: Path, *names: str) -> None:
    entries = [{"config": {"name": name, "base_path": str(add_versions(path.parent / name, 1))}} for name in names]
    graphs = {"mediapipe_config_list": [{"name": "g", "base_path": "."}]} if path.name == "config.json" else {}
    path.write_text(json.dumps({"model_config_list": entries, **graphs}))


async def test_a_changed_subconfig_is_a_changed_configuration(tmp_path: Path) -> None:
    """One that appears, changes or vanishes is seen by a reload."""
    _graph(tmp_path)
    _configure(tmp_path / "config.json", "a")
    subconfig = tmp_path / "subconfig.json"

    async def body(registry: Registry, source: ConfigSource) -> None:
        assert await source.reload() is False
        _configure(subconfig, "inner")
        assert await source.reload() is True
        assert registry.available_versions("inner") == [1]
        assert await source.reload() is False
        subconfig.unlink()
        assert await source.reload() is True
        assert registry.available_versions("inner") == []

    await _load(tmp_path, StubLoader(), body)


async def test_a_graph_that_fails_is_told_by_a_reload(tmp_path: Path) -> None:
    """The text names the graph and the reason."""
    _graph(tmp_path)
    _configure(tmp_path / "config.json")
    loader = StubLoader()

    async def body(registry: Registry, source: ConfigSource) -> None:
        loader.fail("g", 1)
        _edit_handler(tmp_path)
        with pytest.raises(ModelFailure, match=r'^graph "g": the stub was told to fail$'):
            await source.reload()
        assert registry.is_ready("g")

    await _load(tmp_path, loader, body)
