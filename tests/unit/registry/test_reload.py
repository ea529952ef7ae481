"""Changes while calls are in flight: no call fails, nothing is closed under a call, nothing stays open."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import Problem
from ovmstrio.core.request import InferRequest
from ovmstrio.registry import ApplyResult, Registry, VersionState
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of, running
from tests.support.waits import until_async


def _spec(base: Path, nireq: int = 0) -> ModelSpec:
    return ModelSpec(name="m", base_path=base, nireq=nireq)


def _served(registry: Registry) -> StubServable:
    servable = registry.peek("m")
    assert isinstance(servable, StubServable)
    return servable


async def test_unloading_waits_for_calls_in_flight(tmp_path: Path) -> None:
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        with await registry.lease("m"):
            with await registry.lease("m"):
                await registry.apply([])
            await trio.testing.wait_all_tasks_blocked()
            assert registry.statuses()["m"][0].state is VersionState.UNLOADING
            assert loader.open_versions == [("m", 1)]
        await trio.testing.wait_all_tasks_blocked()
        assert registry.statuses()["m"][0].state is VersionState.END
    assert [servable.closed for servable in loader.opened] == [1]
    assert loader.misuse == []


async def test_old_settings_serve_until_the_new_ones_are_loaded(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1)
    await registry.apply([_spec(base)])
    gate = loader.hold("m", 1)
    old = _served(registry)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(base, nireq=2)])
        await loader.begun["m", 1].wait()
        assert _served(registry) is old
        assert registry.statuses()["m"][0].state is VersionState.AVAILABLE
        assert registry.readiness.ready
        gate.set()
    assert _served(registry).spec.nireq == 2
    await trio.testing.wait_all_tasks_blocked()
    assert (old.closed, len(loader.open_versions)) == (1, 1)


async def test_a_failed_change_is_reported_and_the_old_instance_serves(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1, 2)
    await registry.apply([_spec(base)])
    old = _served(registry)
    loader.fail("m", 2)
    result = await registry.apply([_spec(base, nireq=2)])
    assert (result.changed, len(result.failures)) == (False, 1)
    (status,) = registry.statuses()["m"]
    assert status.version == 2
    assert (status.state, status.error_code) == (VersionState.AVAILABLE, "UNKNOWN")
    assert status.reason == "the stub was told to fail"
    assert _served(registry) is old
    assert registry.readiness.ready


@pytest.mark.parametrize("remedy", ["mend", "revert"])
async def test_a_failed_change_heals(tmp_path: Path, remedy: str, loader: StubLoader, registry: Registry) -> None:
    base = add_versions(tmp_path, 1)
    await registry.apply([_spec(base)])
    loader.fail("m", 1)
    await registry.apply([_spec(base, nireq=2)])
    if remedy == "mend":
        loader.mend("m", 1)
        await registry.rescan()
    else:
        await registry.apply([_spec(base)])
    (status,) = registry.statuses()["m"]
    assert (status.state, status.error_code, status.reason) == (VersionState.AVAILABLE, "OK", "")
    assert _served(registry).spec.nireq == (2 if remedy == "mend" else 0)


async def test_a_new_base_path_that_is_missing_leaves_the_old_one_serving(tmp_path: Path, registry: Registry) -> None:
    await registry.apply([_spec(add_versions(tmp_path / "a", 1))])
    result = await registry.apply([_spec(tmp_path / "b")])
    assert "does not exist" in result.failures[0].reason
    assert _served(registry).spec.base_path == tmp_path / "a"


async def test_settings_with_errors_are_reported_and_not_loaded(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1)
    warned = _spec(base).model_copy(update={"problems": (Problem("old spelling", severity="warning"),)})
    assert (await registry.apply([warned])).failures == ()
    faulty = _spec(base, nireq=1).model_copy(update={"problems": (Problem("bad shape"), Problem("bad layout"))})
    (failure,) = (await registry.apply([faulty])).failures
    assert failure.reason == "bad shape\nbad layout"
    assert _served(registry).spec is warned
    assert await registry.apply([_spec(base)]) == ApplyResult()
    assert loader.attempts == {("m", 1): 1}


async def test_the_same_configuration_changes_nothing(tmp_path: Path, loader: StubLoader, registry: Registry) -> None:
    base = add_versions(tmp_path, 1)
    await registry.apply([_spec(base)])
    assert await registry.apply([_spec(base)]) == ApplyResult()
    assert await registry.rescan() == ApplyResult()
    assert loader.attempts["m", 1] == 1


async def test_concurrent_changes_run_in_their_order(tmp_path: Path) -> None:
    loader = StubLoader()
    base = add_versions(tmp_path, 1)
    async with running(registry_of(loader, poll_seconds=0, concurrent_loads=8)) as registry:
        gate = loader.hold("m", 1)
        async with trio.open_nursery() as nursery:
            for nireq in range(1, 5):
                nursery.start_soon(registry.apply, [_spec(base, nireq)])
                await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert [servable.spec.nireq for servable in loader.opened] == [1, 2, 3, 4]
        assert loader.most_at_once == 1
        await trio.testing.wait_all_tasks_blocked()
        assert loader.open_versions == [("m", 1)]


async def test_waiting_rescans_are_merged_into_one(tmp_path: Path) -> None:
    loader = StubLoader()
    loader.fail("m", 1)
    gate = loader.hold("m", 1)
    results: list[ApplyResult] = []
    async with running(registry_of(loader, poll_seconds=0)) as registry:

        async def rescan() -> None:
            results.append(await registry.rescan())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(registry.apply, [_spec(add_versions(tmp_path, 1))])
            await loader.begun["m", 1].wait()
            for _ in range(20):
                nursery.start_soon(rescan)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
    assert loader.attempts["m", 1] == 2
    assert [len(result.failures) for result in results] == [1] * 20


async def test_a_change_continues_when_its_client_is_cancelled(tmp_path: Path) -> None:
    loader = StubLoader()
    gate = loader.hold("m", 1)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        async with trio.open_nursery() as client:
            client.start_soon(registry.apply, [_spec(add_versions(tmp_path, 1))])
            await loader.begun["m", 1].wait()
            client.cancel_scope.cancel()
        gate.set()
        with await registry.lease("m") as lease:
            assert lease.version == "1"
    assert loader.cancelled == []


async def test_a_call_keeps_its_version_during_a_swap(tmp_path: Path) -> None:
    loader = StubLoader()
    seq = trio.testing.Sequencer()
    gate = loader.hold("m", 2)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])

        async def long_call() -> None:
            async with seq(0):
                lease = await registry.lease("m")
            with lease:
                async with seq(3):
                    assert lease.version == "1"
                    assert loader.open_versions == [("m", 1), ("m", 2)]

        async def swap() -> None:
            async with seq(1):
                add_versions(tmp_path, 2)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(registry.rescan)
                    await loader.begun["m", 2].wait()
                    assert registry.available_versions("m") == [1]
                    gate.set()
            async with seq(2):
                assert registry.available_versions("m") == [2]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(long_call)
            nursery.start_soon(swap)
        await trio.testing.wait_all_tasks_blocked()
        assert loader.open_versions == [("m", 2)]
    assert loader.misuse == []


@pytest.fixture
def quick_thread_switches() -> Iterator[None]:
    """Let threads that look at the disk get their turn soon, though the event loop is never idle."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("quick_thread_switches")
async def test_no_call_fails_through_fifty_swaps(tmp_path: Path) -> None:
    loader = StubLoader()
    answered: dict[str, int] = {}
    async with running(registry_of(loader, poll_seconds=0)) as registry:
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
    assert loader.misuse == []
    assert list(answered) == ["1", *(str(2 + swap) for swap in range(0, 50, 2))]
    assert [servable.closed for servable in loader.opened] == [1] * 51
