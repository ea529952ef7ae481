"""Finding a version by the text of a request, in every state of the version."""

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
from tests.support.stub_registry import StubLoader, add_versions

UNKNOWN_NAMES = ["unknown", "", "../m", "m/", "m\0", "%2e%2e", "m" * 100_000]
NO_INTEGERS = ["abc", "1.0", "1abc", " 1", "1_0", "٣", "0x1", "9223372036854775808", "9" * 10_000, "-", "../1"]


def _spec(base: Path, *versions: int) -> ModelSpec:
    return ModelSpec(name="m", base_path=add_versions(base, *versions), version_policy=AllVersions())


async def _refusal(registry: Registry, name: str, version: str) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await registry.lease(name, version)
    return caught.value


@pytest.mark.parametrize(
    ("requested", "served"),
    [("", "10"), ("0", "10"), ("9", "9"), ("10", "10"), ("010", "10"), ("+9", "9"), ("-0", "10")],
)
async def test_a_version_is_named_by_number_and_the_default_is_the_highest(
    tmp_path: Path, requested: str, served: str, registry: Registry
) -> None:
    await registry.apply([_spec(tmp_path, 9, 10)])
    with await registry.lease("m", requested) as lease:
        assert (lease.name, lease.version) == ("m", served)
        assert lease.servable is registry.peek("m", requested)


async def test_an_available_version_is_leased_without_a_checkpoint(tmp_path: Path, registry: Registry) -> None:
    await registry.apply([_spec(tmp_path, 1)])
    with trio.testing.assert_no_checkpoints():
        with await registry.lease("m"):
            pass
        with await registry.lease("m", "1"):
            pass


@pytest.mark.parametrize(
    ("name", "version", "error", "message"),
    [
        *((name, "", ServiceMissing, f'nothing is served under the name "{name[:80]}"') for name in UNKNOWN_NAMES),
        *(
            ("m", version, VersionMissing, f'version {version} of model "m" is not there')
            for version in ("2", "-1", "9223372036854775807")
        ),
    ],
)
async def test_an_unknown_name_or_version_is_refused_at_once_by_each_operation(
    tmp_path: Path, name: str, version: str, error: type[ServerError], message: str, registry: Registry
) -> None:
    await registry.apply([_spec(tmp_path, 1)])
    with trio.testing.assert_no_checkpoints():
        refusals = [await _refusal(registry, name, version)]
    for operation in (registry.peek, registry.is_ready):
        with pytest.raises(ServerError) as caught:
            operation(name, version)
        refusals.append(caught.value)
    assert [(type(refusal), str(refusal)) for refusal in refusals] == [(error, message)] * 3
    assert registry.available_versions(name) == ([1] if name == "m" else [])


@pytest.mark.parametrize("version", NO_INTEGERS)
async def test_a_version_that_is_no_64_bit_integer_is_an_invalid_request(
    tmp_path: Path, version: str, registry: Registry
) -> None:
    await registry.apply([_spec(tmp_path, 1)])
    assert isinstance(await _refusal(registry, "m", version), InvalidRequest)
    with pytest.raises(InvalidRequest, match=r"^Model version must be an integer"):
        registry.is_ready("m", version)


async def test_readiness_has_no_version_zero(tmp_path: Path, loader: StubLoader, registry: Registry) -> None:
    loader.fail("m", 2)
    await registry.apply([_spec(tmp_path, 1, 2)])
    assert registry.is_ready("m")
    assert registry.is_ready("m", "1")
    assert not registry.is_ready("m", "2")
    with pytest.raises(NotFound):
        registry.is_ready("m", "0")


async def test_a_retired_version_is_refused_as_retired_and_the_default_as_missing(
    tmp_path: Path, registry: Registry
) -> None:
    await registry.apply([_spec(tmp_path, 1)])
    (tmp_path / "1").rmdir()
    await registry.rescan()
    refusal = await _refusal(registry, "m", "1")
    assert (type(refusal), str(refusal)) == (VersionRetired, 'version 1 of model "m" is retired')
    refusal = await _refusal(registry, "m", "")
    assert (type(refusal), str(refusal)) == (VersionMissing, 'the default version of model "m" is not there')
    assert not registry.is_ready("m", "1")
    with pytest.raises(NotFound):
        registry.is_ready("m")


async def test_a_failed_version_is_refused_at_once_with_a_hint(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    loader.fail("m", 1)
    await registry.apply([_spec(tmp_path, 1)])
    refusal = await _refusal(registry, "m", "1")
    assert isinstance(refusal, VersionLoading)
    assert str(refusal) == 'version 1 of model "m" is not loaded yet: its last load failed'
    assert type(await _refusal(registry, "m", "")) is VersionMissing


@pytest.mark.parametrize("version", ["", "1"])
async def test_a_lease_waits_for_a_load(tmp_path: Path, version: str, loader: StubLoader, registry: Registry) -> None:
    gate = loader.hold("m", 1)
    leased: list[str] = []

    async def call() -> None:
        with await registry.lease("m", version) as lease:
            leased.append(lease.version)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(tmp_path, 1)])
        await loader.begun["m", 1].wait()
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        assert leased == []
        with pytest.raises(VersionLoading, match=r"of model \"m\" is not loaded yet$"):
            registry.peek("m", version)
        gate.set()
    assert leased == ["1"]


async def test_a_lease_waits_ten_seconds_at_most(
    tmp_path: Path, loader: StubLoader, registry: Registry, autojump_clock: trio.testing.MockClock
) -> None:
    gate = loader.hold("m", 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(tmp_path, 1)])
        await loader.begun["m", 1].wait()
        started = trio.current_time()
        assert isinstance(await _refusal(registry, "m", "1"), VersionLoading)
        assert trio.current_time() - started == pytest.approx(10)
        gate.set()


async def test_a_waiting_lease_is_refused_when_the_load_fails(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    gate = loader.hold("m", 1)
    loader.fail("m", 1)
    refusals: list[ServerError] = []

    async def call(version: str) -> None:
        refusals.append(await _refusal(registry, "m", version))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(tmp_path, 1)])
        await loader.begun["m", 1].wait()
        nursery.start_soon(call, "1")
        nursery.start_soon(call, "")
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert {type(refusal) for refusal in refusals} == {VersionLoading, VersionMissing}


async def test_a_cancelled_wait_holds_no_lease(tmp_path: Path, loader: StubLoader, registry: Registry) -> None:
    gate = loader.hold("m", 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.apply, [_spec(tmp_path, 1)])
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


async def test_version_statuses_are_of_one_version_or_of_all(tmp_path: Path, registry: Registry) -> None:
    await registry.apply([_spec(tmp_path, 1, 3)])
    assert [status.version for status in registry.version_statuses("m")] == [1, 3]
    (one,) = registry.version_statuses("m", 3)
    assert (one.version, one.state) == (3, VersionState.AVAILABLE)
    with pytest.raises(NotFound, match='of model "m" is not there'):
        registry.version_statuses("m", 2)
    with pytest.raises(NotFound, match="nothing is served under the name"):
        registry.version_statuses("unknown")
