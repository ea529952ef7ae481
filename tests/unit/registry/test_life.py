"""Readiness, polling and the end: the registry as a child of the supervisor."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import NotReady
from ovmstrio.registry import Readiness, Registry, VersionState
from tests.support.stub_registry import StubLoader, add_versions, registry_of, running
from tests.support.waits import WAIT_SECONDS
from tests.unit.registry.conftest import Loading


def _spec(base: Path, name: str = "m") -> ModelSpec:
    return ModelSpec(name=name, base_path=base)


async def _until(registry: Registry, name: str, versions: list[int]) -> None:
    while registry.available_versions(name) != versions:
        await registry.wait_change()


# Readiness


async def test_the_registry_is_ready_after_its_first_pass_and_stays_ready(
    tmp_path: Path, loading: Loading, registry: Registry
) -> None:
    reported: list[Readiness] = []
    registry.subscribe_readiness(reported.append)
    assert registry.readiness == Readiness(ready=False, reason="the configuration has not been applied yet")
    specs = [_spec(add_versions(tmp_path / name, 1), name) for name in ("a", "b", "c")]
    async with loading(*specs[:2], name="b"):
        await _until(registry, "a", [1])
        await trio.testing.wait_all_tasks_blocked()
        assert registry.readiness == Readiness(ready=False, reason="loading 1 of 2 models: b")
    assert registry.readiness == Readiness(ready=True)
    async with loading(*specs, name="c"):
        assert registry.readiness.ready
    assert reported == [Readiness(ready=True)]


@pytest.mark.parametrize("ready_when_failed", [False, True])
async def test_a_model_without_a_working_version_keeps_the_server_from_being_ready(
    tmp_path: Path, loader: StubLoader, ready_when_failed: bool
) -> None:
    loader.fail("b", 1)
    async with running(registry_of(loader, poll_seconds=0, ready_when_failed=ready_when_failed)) as registry:
        good, bad = add_versions(tmp_path / "a", 1), add_versions(tmp_path / "b", 1)
        await registry.apply([_spec(good, "a"), _spec(bad, "b"), _spec(tmp_path / "c", "c")])
        assert registry.readiness.ready is ready_when_failed
        if not ready_when_failed:
            assert 'model "b": version 1: the stub was told to fail; model "c": ' in registry.readiness.reason
        await registry.apply([_spec(good, "a")])
        assert registry.readiness.ready


@pytest.mark.parametrize("ready_when_empty", [False, True])
async def test_an_empty_registry_is_ready_only_if_configured(ready_when_empty: bool) -> None:
    registry = registry_of(StubLoader(), poll_seconds=0, ready_when_empty=ready_when_empty)
    async with running(registry):
        await registry.apply([])
        assert registry.readiness.ready is ready_when_empty
        assert registry.readiness.reason == ("" if ready_when_empty else "no model is configured")


# Polling


async def test_polling_finds_new_and_removed_versions(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with running(registry_of(StubLoader(), poll_seconds=1)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        add_versions(tmp_path, 2)
        await _until(registry, "m", [2])
        (tmp_path / "2").rmdir()
        await _until(registry, "m", [1])


async def test_a_serving_version_is_not_reloaded_for_changed_files(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    await registry.apply([_spec(add_versions(tmp_path, 1))])
    (tmp_path / "1" / "model.onnx").write_bytes(b"changed")
    assert not (await registry.rescan()).changed
    assert loader.attempts["m", 1] == 1


async def test_a_failed_version_is_retried_at_growing_intervals_and_when_its_files_change(
    tmp_path: Path, loader: StubLoader, autojump_clock: trio.testing.MockClock
) -> None:
    loader.fail("m", 1)
    times: list[float] = []
    async with running(registry_of(loader, poll_seconds=0.5)) as registry:
        registry.subscribe(lambda status: times.append(trio.current_time()) if status.error_code == "UNKNOWN" else None)
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        await loader.wait_attempts(9)
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert pauses[:7] == pytest.approx([1, 2, 4, 8, 16, 32, 60], abs=0.6)
        loader.mend("m", 1)
        began = trio.current_time()
        (tmp_path / "1" / "model.bin").touch()
        await _until(registry, "m", [1])
        assert trio.current_time() - began <= 2


async def test_polling_begins_after_the_first_pass(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    polls: list[float] = []

    async def note() -> None:
        polls.append(trio.current_time())

    registry = registry_of(StubLoader(), poll_seconds=1, ready_when_empty=True)
    registry.on_poll(note)
    async with running(registry):
        await trio.sleep(100)
        assert polls == []
        await registry.apply([])
        await trio.sleep(2.5)
        assert len(polls) == 2


# The end


async def test_shutdown_closes_serving_and_retiring_versions(tmp_path: Path, loader: StubLoader) -> None:
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        specs = [_spec(add_versions(tmp_path / name, 1), name) for name in ("a", "b")]
        await registry.apply(specs)
        retiring = await registry.lease("a")
        await registry.apply(specs[1:])
        with retiring:
            pass
    assert [servable.closed for servable in loader.opened] == [1, 1]
    assert {status.state for (status,) in registry.statuses().values()} == {VersionState.END}
    assert registry.readiness == Readiness(ready=False, reason="the server is shutting down")


@pytest.mark.parametrize("steps", range(6))
def test_a_registry_cancelled_while_it_starts_ends(steps: int) -> None:
    async def start() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end, nursery.cancel_scope)
            await nursery.start(registry_of(StubLoader(), poll_seconds=0).run)

    async def end(starting: trio.CancelScope) -> None:
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        starting.cancel()

    # Nothing within could end a test that hangs because of what is shielded.
    running_it = threading.Thread(target=trio.run, args=(start,), daemon=True)
    running_it.start()
    running_it.join(WAIT_SECONDS)
    assert not running_it.is_alive()


async def test_shutdown_cancels_loads_and_refuses_waiting_callers(tmp_path: Path) -> None:
    loader = StubLoader()
    loader.hold("m", 1)
    registry = registry_of(loader, poll_seconds=0)
    async with trio.open_nursery() as nursery:

        async def refused(ask: str) -> None:
            with pytest.raises(NotReady, match="shutting down"):
                await (registry.lease("m") if ask == "lease" else registry.apply([_spec(tmp_path)]))

        async with running(registry):
            nursery.start_soon(refused, "apply")
            add_versions(tmp_path, 1)
            await loader.begun["m", 1].wait()
            nursery.start_soon(refused, "lease")
            nursery.start_soon(refused, "apply")
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(refused, "apply")
        nursery.start_soon(refused, "lease")
    assert loader.cancelled == [("m", 1)]
    assert loader.opened == []


async def test_shutdown_waits_a_bounded_time_for_calls(
    tmp_path: Path, loader: StubLoader, autojump_clock: trio.testing.MockClock
) -> None:
    async def call(name: str, seconds: float) -> None:
        with await registry.lease(name):
            await trio.sleep(seconds)

    async with trio.open_nursery() as callers:
        async with running(registry_of(loader, poll_seconds=0, shutdown_seconds=7)) as registry:
            await registry.apply([_spec(add_versions(tmp_path / name, 1), name) for name in ("slow", "quick")])
            callers.start_soon(call, "slow", 1000)
            callers.start_soon(call, "quick", 3)
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
        assert trio.current_time() - began == pytest.approx(7)
        assert loader.open_versions == [("slow", 1)]
        callers.cancel_scope.cancel()
    assert loader.misuse == []


@pytest.mark.parametrize("fault", ["raise", "hang"])
async def test_a_servable_that_cannot_be_closed_ends_all_the_same(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, fault: str, loader: StubLoader
) -> None:
    async def aclose() -> None:
        if fault == "raise":
            raise OSError("the device is lost")
        await trio.sleep_forever()

    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        loader.opened[0].aclose = aclose  # type: ignore[method-assign]
        await registry.apply([])
        while registry.statuses()["m"][0].state is not VersionState.END:
            await registry.wait_change()
