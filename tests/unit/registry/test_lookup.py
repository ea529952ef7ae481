"""Finding a version by what a request says, in every state that it may be in."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import AllVersions, ModelSpec
from ovmstrio.core.errors import (
    InvalidRequest,
    NotFound,
    ServerError,
    ServiceMissing,
    VersionLoading,
    VersionMissing,
    VersionRetired,
)
from ovmstrio.registry import Registry, VersionState
from tests.support.stub_registry import StubLoader, add_versions, registry_of, running

UNKNOWN_NAMES = ["nobody", "", "../m", "m/", "m\0", "%2e%2e", "m" * 100_000]
NO_INTEGERS = ["abc", "1.0", "1abc", " 1", "1_0", "٣", "0x1", "9223372036854775808", "9" * 10_000, "-", "../1"]


def _spec(base: Path, name: str = "m") -> ModelSpec:
    return ModelSpec(name=name, base_path=base, version_policy=AllVersions())


async def _refusal(registry: Registry, name: str, version: str) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await registry.lease(name, version)
    return caught.value


@pytest.mark.parametrize(
    ("asked", "served"), [("", "10"), ("0", "10"), ("9", "9"), ("10", "10"), ("010", "10"), ("+9", "9"), ("-0", "10")]
)
async def test_a_version_is_named_by_number_and_the_default_is_the_highest(
    tmp_path: Path, asked: str, served: str
) -> None:
    """Nothing and "0" mean the highest version; a number means itself however it is spelled."""
    loader = StubLoader()
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 9, 10))])
        with await registry.lease("m", asked) as lease:
            assert (lease.name, lease.version) == ("m", served)
            assert lease.servable is registry.peek("m", asked)


async def test_an_available_version_is_leased_without_a_checkpoint(tmp_path: Path) -> None:
    """The way of every request through the registry costs no trip through the scheduler."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        with trio.testing.assert_no_checkpoints():
            with await registry.lease("m"):
                pass
            with await registry.lease("m", "1"):
                pass


@pytest.mark.parametrize("name", UNKNOWN_NAMES)
async def test_an_unknown_name_is_refused_by_each_operation(tmp_path: Path, name: str) -> None:
    """The refusal has the name, and a type that the doors have words for."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        refusal = await _refusal(registry, name, "")
        expected = (ServiceMissing, f'nothing is served under the name "{name[:80]}"')
        assert (type(refusal), str(refusal)) == expected
        for ask in (registry.peek, registry.is_ready):
            with pytest.raises(ServiceMissing) as caught:
                ask(name)
            assert str(caught.value) == expected[1]
        assert registry.available_versions(name) == []


@pytest.mark.parametrize("version", NO_INTEGERS)
async def test_a_version_that_is_no_integer_is_the_callers_fault(tmp_path: Path, version: str) -> None:
    """What is not an integer of 64 bits is refused as such, whether the name exists or not."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        assert isinstance(await _refusal(registry, "m", version), InvalidRequest)
        with pytest.raises(InvalidRequest, match=r"^Model version must be an integer"):
            registry.is_ready("m", version)


@pytest.mark.parametrize("version", ["2", "-1", "9223372036854775807"])
async def test_a_version_that_never_was_is_not_found(tmp_path: Path, version: str) -> None:
    """A number that no directory had is unknown to every operation, at once."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        with trio.testing.assert_no_checkpoints():
            refusal = await _refusal(registry, "m", version)
        expected = (VersionMissing, f'version {version} of model "m" is not there')
        assert (type(refusal), str(refusal)) == expected
        for ask in (registry.peek, registry.is_ready):
            with pytest.raises(VersionMissing) as caught:
                ask("m", version)
            assert str(caught.value) == expected[1]


async def test_readiness_of_a_version_is_asked_without_version_zero(tmp_path: Path) -> None:
    """To ask whether "0" is ready is to ask for a version that never exists."""
    loader = StubLoader()
    loader.fail("m", 2)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1, 2))])
        assert registry.is_ready("m")
        assert registry.is_ready("m", "1")
        assert not registry.is_ready("m", "2")
        with pytest.raises(NotFound):
            registry.is_ready("m", "0")


async def test_a_retired_version_says_so(tmp_path: Path) -> None:
    """A version whose directory went is retired; the default one is then missing."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        (tmp_path / "1").rmdir()
        await registry.rescan()
        refusal = await _refusal(registry, "m", "1")
        assert (type(refusal), str(refusal)) == (VersionRetired, 'version 1 of model "m" is retired')
        refusal = await _refusal(registry, "m", "")
        assert (type(refusal), str(refusal)) == (VersionMissing, 'the default version of model "m" is not there')
        assert not registry.is_ready("m", "1")
        with pytest.raises(NotFound):
            registry.is_ready("m")


async def test_a_failed_version_is_refused_at_once_with_a_hint(tmp_path: Path) -> None:
    """Waiting ten seconds for a version that has failed would help nobody."""
    loader = StubLoader()
    loader.fail("m", 1)
    async with running(registry_of(loader, poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1))])
        refusal = await _refusal(registry, "m", "1")
        assert isinstance(refusal, VersionLoading)
        assert str(refusal) == 'version 1 of model "m" is not loaded yet: its last load failed'
        assert type(await _refusal(registry, "m", "")) is VersionMissing


@pytest.mark.parametrize("version", ["", "1"])
async def test_a_lease_waits_while_its_version_is_being_loaded(tmp_path: Path, version: str) -> None:
    """A call that comes during a load is answered when the load ends."""
    loader = StubLoader()
    gate = loader.hold("m", 1)
    got: list[str] = []

    async def call(registry: Registry) -> None:
        with await registry.lease("m", version) as lease:
            got.append(lease.version)

    async with running(registry_of(loader, poll_seconds=0)) as registry, trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(add_versions(tmp_path, 1))])
        await loader.begun["m", 1].wait()
        nursery.start_soon(call, registry)
        await trio.testing.wait_all_tasks_blocked()
        assert got == []
        with pytest.raises(VersionLoading, match=r"of model \"m\" is not loaded yet$"):
            registry.peek("m", version)
        gate.set()
    assert got == ["1"]


async def test_a_lease_gives_up_waiting_after_ten_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A load that takes longer than a caller is made to wait is told to the caller."""
    loader = StubLoader()
    gate = loader.hold("m", 1)
    async with running(registry_of(loader, poll_seconds=0)) as registry, trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(add_versions(tmp_path, 1))])
        await loader.begun["m", 1].wait()
        started = trio.current_time()
        assert isinstance(await _refusal(registry, "m", "1"), VersionLoading)
        assert trio.current_time() - started == pytest.approx(10)
        gate.set()


async def test_a_waiting_lease_hears_of_the_failure_when_it_happens(tmp_path: Path) -> None:
    """Who waits for a load that then fails is told at once."""
    loader = StubLoader()
    gate = loader.hold("m", 1)
    loader.fail("m", 1)
    refusals: list[ServerError] = []

    async def call(registry: Registry, version: str) -> None:
        refusals.append(await _refusal(registry, "m", version))

    async with running(registry_of(loader, poll_seconds=0)) as registry, trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(add_versions(tmp_path, 1))])
        await loader.begun["m", 1].wait()
        nursery.start_soon(call, registry, "1")
        nursery.start_soon(call, registry, "")
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert {type(refusal) for refusal in refusals} == {VersionLoading, VersionMissing}


async def test_a_call_that_gives_up_waiting_leaves_nothing_behind(tmp_path: Path) -> None:
    """A caller that is cancelled while it waits holds no lease."""
    loader = StubLoader()
    gate = loader.hold("m", 1)
    async with running(registry_of(loader, poll_seconds=0)) as registry, trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(add_versions(tmp_path, 1))])
        await loader.begun["m", 1].wait()
        async with trio.open_nursery() as callers:
            callers.start_soon(registry.lease, "m")
            await trio.testing.wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        gate.set()
        with await registry.lease("m"):
            await registry.apply([])
            assert registry.statuses()["m"][0].state is VersionState.UNLOADING
        await trio.testing.wait_all_tasks_blocked()
        assert registry.statuses()["m"][0].state is VersionState.END


async def test_states_are_told_of_one_version_or_of_all(tmp_path: Path) -> None:
    """Zero means every version ever seen; one that never was, and an unknown name, are refused."""
    async with running(registry_of(StubLoader(), poll_seconds=0)) as registry:
        await registry.apply([_spec(add_versions(tmp_path, 1, 3))])
        assert [status.version for status in registry.version_statuses("m")] == [1, 3]
        (one,) = registry.version_statuses("m", 3)
        assert (one.version, one.state) == (3, VersionState.AVAILABLE)
        with pytest.raises(NotFound, match='of model "m" is not there'):
            registry.version_statuses("m", 2)
        with pytest.raises(NotFound, match="nothing is served under the name"):
            registry.version_statuses("nobody")
