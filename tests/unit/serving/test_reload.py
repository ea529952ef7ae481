from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.specs import ModelSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ModelFailure, Problem, VersionsFailure
from ovmstrio.core.request import InferRequest
from ovmstrio.serving.model_versions import Listing
from ovmstrio.serving.records import ApplyResult, VersionState
from ovmstrio.serving.registry import Registry
from ovmstrio.serving.source import ConfigSource, reload_versions
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running
from tests.support.waits import until_async
from tests.unit.serving.conftest import Loading


def _spec(base: Path, nireq: int = 0) -> ModelSpec:
    return ModelSpec(name="m", base_path=base, nireq=nireq)


def _served(registry: Registry) -> StubServable:
    servable = registry.peek("m")
    assert isinstance(servable, StubServable)
    return servable


async def test_old_settings_serve_until_the_new_ones_are_loaded(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1)
    await registry.apply([_spec(base)])
    old = _served(registry)
    async with loading(_spec(base, nireq=2)):
        assert _served(registry) is old
        assert registry.statuses()["m"][0].state is VersionState.AVAILABLE
        assert registry.readiness.ready
    assert _served(registry).spec.nireq == 2
    await trio.testing.wait_all_tasks_blocked()
    assert (old.closed, len(loader.open_versions)) == (1, 1)


@pytest.mark.parametrize("remedy", ["recover", "revert"])
async def test_a_failed_change_is_reported_and_the_old_instance_serves_until_it_heals(
    tmp_path: Path, remedy: str, loader: StubLoader, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1, 2)
    await registry.apply([_spec(base)])
    old = _served(registry)
    loader.fail("m", 2)
    result = await registry.apply([_spec(base, nireq=2)])
    assert (result.changed, len(result.failures)) == (False, 1)
    (status,) = registry.statuses()["m"]
    assert (status.version, status.state, status.error_code) == (2, VersionState.AVAILABLE, "UNKNOWN")
    assert status.reason == "the stub is set to fail"
    assert _served(registry) is old
    assert registry.readiness.ready
    if remedy == "recover":
        loader.recover("m", 2)
        await registry.rescan()
    else:
        await registry.apply([_spec(base)])
    (status,) = registry.statuses()["m"]
    assert (status.state, status.error_code, status.reason) == (VersionState.AVAILABLE, "OK", "")
    assert _served(registry).spec.nireq == (2 if remedy == "recover" else 0)


async def test_a_new_base_path_that_is_missing_leaves_the_old_one_serving(tmp_path: Path, registry: Registry) -> None:
    await registry.apply([_spec(add_versions(tmp_path / "a", 1))])
    result = await registry.apply([_spec(tmp_path / "b")])
    assert "does not exist" in result.failures[0].reason
    assert _served(registry).spec.base_path == tmp_path / "a"


async def test_settings_with_errors_are_reported_and_not_loaded(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1)
    wait_drain_warning = _spec(base).model_copy(update={"problems": (Problem("old spelling", severity="warning"),)})
    assert (await registry.apply([wait_drain_warning])).failures == ()
    faulty = _spec(base, nireq=1).model_copy(update={"problems": (Problem("bad shape"), Problem("bad layout"))})
    (failure,) = (await registry.apply([faulty])).failures
    assert failure.reason == "bad shape\nbad layout"
    assert _served(registry).spec is wait_drain_warning
    assert await registry.apply([_spec(base)]) == ApplyResult()
    assert loader.attempts == {("m", 1): 1}


async def test_concurrent_changes_run_in_their_order(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1)
    async with loading(_spec(base, 1)) as nursery:
        for nireq in range(2, 5):
            nursery.start_soon(registry.apply, [_spec(base, nireq)])
            await trio.testing.wait_all_tasks_blocked()
    assert [servable.spec.nireq for servable in loader.opened] == [1, 2, 3, 4]
    assert loader.most_at_once == 1
    await trio.testing.wait_all_tasks_blocked()
    assert loader.open_versions == [("m", 1)]


async def test_waiting_rescans_are_merged_into_one(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    loader.fail("m", 1)
    results: list[ApplyResult] = []

    async def rescan() -> None:
        results.append(await registry.rescan())

    async with loading(_spec(add_versions(tmp_path, 1))) as nursery:
        for _ in range(20):
            nursery.start_soon(rescan)
        await trio.testing.wait_all_tasks_blocked()
    assert loader.attempts["m", 1] == 2
    assert [len(result.failures) for result in results] == [1] * 20


async def test_a_change_continues_when_its_client_is_cancelled(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    async with loading(_spec(add_versions(tmp_path, 1))) as client:
        client.cancel_scope.cancel()
    with await registry.lease("m") as lease:
        assert lease.version == "1"
    assert loader.cancelled == []


@pytest.fixture
def quick_thread_switches() -> Iterator[None]:
    """Shorten the switch interval, so that threads that read the disk run although the event loop is never idle."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("quick_thread_switches")
async def test_no_call_fails_through_fifty_swaps(tmp_path: Path, loader: StubLoader, registry: Registry) -> None:
    answered: dict[str, int] = {}
    await registry.apply([_spec(add_versions(tmp_path, 1))])

    async def call_for_ever() -> None:
        while True:
            with await registry.lease("m") as lease:
                response = await lease.servable.infer(InferRequest("m"))
                assert response.model_version == lease.version
                answered[lease.version] = answered.get(lease.version, 0) + 1
            # A loop that never waits would keep the interpreter from the thread that reads the folder.
            await trio.sleep(0.005)

    async with trio.open_nursery() as clients:
        for _ in range(8):
            clients.start_soon(call_for_ever)
        for swap in range(50):
            if swap % 2:
                assert (await registry.apply([_spec(tmp_path, nireq=swap)])).changed
            else:
                add_versions(tmp_path, 2 + swap)
                assert (await registry.rescan()).changed
                await until_async(lambda swap=swap: str(2 + swap) in answered)  # type: ignore[misc]
        clients.cancel_scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert loader.open_versions == [("m", 50)]
    assert len(loader.opened) == 51
    assert list(answered) == ["1", *(str(2 + swap) for swap in range(0, 50, 2))]


# The configuration file


def _parse(content: bytes, path: Path) -> ServerSpec:
    """Parse the file format of these tests: a JSON list of names of models, each with a folder of its name."""
    try:
        names = json.loads(content)
    except ValueError as error:
        raise ConfigError([Problem("not valid json", file=str(path))]) from error
    models = tuple(ModelSpec(name=name, base_path=path.parent / name) for name in names)
    problems = [Problem(f'the name "{name}" is taken') for name in {name for name in names if names.count(name) > 1}]
    return ServerSpec(services=models, problems=(Problem("an old key", severity="warning"), *problems))


class _Site:
    def __init__(self, folder: Path, *, poll_seconds: float = 0) -> None:
        self.folder = folder
        self.config = folder / "config.json"
        self.loader = StubLoader()
        self.registry = registry_of(self.loader, poll_seconds=poll_seconds)
        self.source = ConfigSource(self.config, self.registry, _parse)
        self.registry.on_poll(self.source.poll)

    def write(self, *names: str) -> None:
        for name in names:
            add_versions(self.folder / name, 1)
        self.config.write_text(json.dumps(names))

    def served(self) -> list[str]:
        return [name for name in self.registry.statuses() if self.registry.available_versions(name)]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[_Site]:
    """A site with model "a" that is served and does not poll."""
    site = _Site(tmp_path)
    site.write("a")
    async with running(site.registry):
        await site.source.reload(force=True)
        yield site


async def test_a_reload_applies_a_changed_file_once_and_finds_new_versions(site: _Site) -> None:
    site.write("a", "b")
    assert await site.source.reload() is True
    assert site.served() == ["a", "b"]
    assert await site.source.reload() is False
    assert await site.source.reload(force=True) is True
    assert site.loader.attempts == {("a", 1): 1, ("b", 1): 1}
    add_versions(site.folder / "a", 2)
    assert await site.source.reload() is True
    assert site.registry.available_versions("a") == [2]


async def test_every_reload_reports_a_file_that_cannot_be_parsed(
    site: _Site, autojump_clock: trio.testing.MockClock
) -> None:
    site.config.write_text("[")
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="not valid json"):
            await site.source.reload()
    assert site.served() == ["a"]
    site.write("a")
    assert await site.source.reload() is True


async def test_a_partly_written_file_is_read_again(site: _Site, autojump_clock: trio.testing.MockClock) -> None:
    site.write("a", "b")
    whole = site.config.read_bytes()
    site.config.write_bytes(whole[:5])
    seen: list[bytes] = []

    def parse_and_finish(content: bytes, path: Path) -> ServerSpec:
        seen.append(content)
        site.config.write_bytes(whole)
        return _parse(content, path)

    assert await ConfigSource(site.config, site.registry, parse_and_finish).reload()
    assert site.served() == ["a", "b"]
    assert seen == [whole[:5], whole]


async def test_an_unexpected_error_of_a_poll_is_logged_and_keeps_the_server(tmp_path: Path) -> None:
    def parse(content: bytes, path: Path) -> ServerSpec:
        if content == b"[]":
            raise RuntimeError("unexpected")
        return _parse(content, path)

    site = _Site(tmp_path, poll_seconds=0.001)
    site.source = ConfigSource(site.config, site.registry, parse)
    site.registry.on_poll(site.source.poll)
    site.write("a")
    async with running(site.registry):
        await site.source.reload(force=True)
        with capture_logs() as logs:
            site.write()
            await until_async(lambda: site.source.reloads["failure"])
        site.write("a", "b")
        await until_async(lambda: site.source.reloads == {"success": 2, "failure": 1})
        assert site.served() == ["a", "b"]
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["config reload failed"]


async def test_a_service_whose_files_cannot_be_listed_fails_alone(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = registry.kinds["model"]
    list_versions = kind.list_versions

    def refuse(spec: ModelSpec) -> Listing:
        if spec.name == "m":
            raise PermissionError(13, "Permission denied")
        return list_versions(spec)

    monkeypatch.setattr(kind, "list_versions", refuse)
    specs = [_spec(add_versions(tmp_path, 1)), ModelSpec(name="other", base_path=add_versions(tmp_path / "other", 1))]
    (failure,) = (await registry.apply(specs)).failures
    assert (failure.name, failure.reason) == ("m", "the files cannot be examined: [Errno 13] Permission denied")
    assert registry.available_versions("other") == [1]
    monkeypatch.undo()
    assert (await registry.rescan()).failures == ()
    assert registry.available_versions("m") == [1]


async def test_the_next_reload_retries_a_model_that_failed(site: _Site) -> None:
    site.loader.fail("b", 1)
    site.write("a", "b")
    with pytest.raises(ModelFailure) as caught:
        await site.source.reload()
    assert caught.value.message == 'model "b" version 1: the stub is set to fail'
    assert site.served() == ["a"]
    site.loader.recover("b", 1)
    assert await site.source.reload() is True
    assert site.served() == ["a", "b"]


async def test_a_duplicate_name_fails_the_reload_and_a_warning_does_not(site: _Site) -> None:
    site.write("a", "b", "b")
    with pytest.raises(ModelFailure, match='the name "b" is taken'):
        await site.source.reload()
    assert site.served() == ["a", "b"]
    site.write("a")
    assert await site.source.reload() is True


async def test_a_rescan_reports_the_version_that_fails(site: _Site) -> None:
    site.loader.fail("a", 2)
    add_versions(site.folder / "a", 2)
    with pytest.raises(VersionsFailure, match=r'^model "a" version 2: the stub is set'):
        await reload_versions(site.registry)
    assert site.registry.available_versions("a") == [1]


async def test_concurrent_reloads_apply_the_file_once(site: _Site) -> None:
    answers: list[bool] = []

    async def reload() -> None:
        answers.append(await site.source.reload())

    site.write("a", "b")
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(reload)
    assert sorted(answers) == [False] * 19 + [True]
    assert site.loader.attempts == {("a", 1): 1, ("b", 1): 1}


async def test_a_missing_file_is_reported_and_stale_each_time(site: _Site) -> None:
    for _ in range(2):
        content = site.config.read_bytes()
        site.config.unlink()
        assert await site.source.is_stale()
        with pytest.raises(ConfigError) as raised:
            await site.source.reload()
        assert raised.value.message == f"{site.config}: the file cannot be read: No such file or directory"
        assert site.served() == ["a"]
        site.source.note(raised.value)
        assert not await site.source.is_stale()
        site.config.write_bytes(content)
        assert not await site.source.is_stale()


async def test_polling_logs_each_fault_of_the_file_once(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    site = _Site(tmp_path, poll_seconds=1)
    site.write("a")
    async with running(site.registry):
        await site.source.reload(force=True)
        with capture_logs() as logs:
            for change in (lambda: site.config.write_text("["), site.config.unlink):
                change()
                for _ in range(5):
                    await site.source.poll()
        reasons = [entry["reason"] for entry in logs if entry["event"] == "config reload failed"]
        assert reasons == [
            f"{site.config}: not valid json",
            f"{site.config}: the file cannot be read: No such file or directory",
        ]
        assert site.served() == ["a"]
        site.write("b")
        while site.served() != ["b"]:
            await site.registry.wait_change()
