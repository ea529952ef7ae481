from __future__ import annotations

import threading
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.specs import AllVersions, LatestVersions, ModelSpec, SpecificVersions, VersionPolicy
from ovmstrio.core.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    NotReady,
    Problem,
    ServerError,
    ServiceMissing,
    VersionLoading,
    VersionMissing,
    VersionRetired,
)
from ovmstrio.protocols.kserve.extensions import repository_index
from ovmstrio.serving import loading as version_loader
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.records import Readiness, VersionState, VersionStatus
from ovmstrio.serving.registry import ReadyRequires, Registry
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.telemetry.process_metrics import MemoryGrowthMeter
from ovmstrio.util.truncation import cut
from tests.support.stub_registry import StubLoader, add_versions, registry_of, running
from tests.support.waits import WAIT_SECONDS
from tests.unit.serving.conftest import Loading

LOADING, AVAILABLE, END = VersionState.LOADING, VersionState.AVAILABLE, VersionState.END


def _spec(base: Path, policy: VersionPolicy | None = None, name: str = "m") -> ModelSpec:
    return ModelSpec(name=name, base_path=base, version_policy=policy or LatestVersions())


def _states(registry: Registry, name: str = "m") -> dict[int, tuple[VersionState, str]]:
    return {status.version: (status.state, status.error_code) for status in registry.statuses()[name]}


async def test_a_version_that_cannot_be_loaded_is_listed_and_the_next_lower_one_serves(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    loader.fail("m", 3, ConfigError([Problem("no model found", file="3")]))
    result = await registry.apply([_spec(add_versions(tmp_path, 1, 2, 3))])
    assert [(status.version, status.reason) for status in result.failures] == [(3, "3: no model found")]
    assert result.changed
    assert _states(registry) == {2: (AVAILABLE, "OK"), 3: (LOADING, "UNKNOWN")}
    assert registry.available_versions("m") == [2]
    with await registry.lease("m") as lease:
        assert lease.version == "2"


async def test_memory_growth_is_attributed_only_to_a_load_that_ran_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = count(1000, 24)
    monkeypatch.setattr(version_loader, "MemoryGrowthMeter", partial(MemoryGrowthMeter, lambda: next(sizes)))
    loader, metrics = StubLoader(), Metrics()
    gates = [loader.hold("m", version) for version in (2, 3)]
    base = add_versions(tmp_path, 1)
    registry = registry_of(loader, poll_seconds=0, make_context=partial(LoadContext, meters=metrics))
    async with running(registry):
        await registry.apply([_spec(base, AllVersions())])
        add_versions(tmp_path, 2, 3)
        async with trio.open_nursery() as tasks:
            tasks.start_soon(registry.rescan)
            for version in (2, 3):
                await loader.begun["m", version].wait()
            for gate in gates:
                gate.set()
        grown = {status.version: status.grown_bytes for status in registry.statuses()["m"]}
    assert grown == {1: 24, 2: None, 3: None}
    reported = [line for line in metrics.render().decode().splitlines() if line.startswith("ovmstrio_memory_bytes")]
    assert reported == ['ovmstrio_memory_bytes{name="m",part="resident",version="1"} 24.0']


async def test_an_unexpected_exception_of_a_loader_fails_its_version_only(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    loader.fail("bad", 1, ZeroDivisionError("division by zero"))
    good, bad = add_versions(tmp_path / "good", 1), add_versions(tmp_path / "bad", 1)
    result = await registry.apply([_spec(bad, name="bad"), _spec(good, name="good")])
    assert [status.reason for status in result.failures] == ["ZeroDivisionError: division by zero"]
    assert registry.available_versions("good") == [1]


async def test_a_policy_change_neither_reloads_nor_closes_versions_that_stay(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    base = add_versions(tmp_path, 1, 2, 3)
    await registry.apply([_spec(base, LatestVersions(num_versions=2))])
    await registry.apply([_spec(base, SpecificVersions(versions=(1, 3)))])
    await trio.testing.wait_all_tasks_blocked()
    assert _states(registry) == {1: (AVAILABLE, "OK"), 2: (END, "OK"), 3: (AVAILABLE, "OK")}
    assert loader.attempts == {("m", 1): 1, ("m", 2): 1, ("m", 3): 1}


async def test_a_version_that_returns_while_it_retires_is_available(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    spec = _spec(add_versions(tmp_path, 1))
    await registry.apply([spec])
    with await registry.lease("m") as old:
        await registry.apply([])
        await registry.apply([spec])
        assert _states(registry) == {1: (AVAILABLE, "OK")}
        with await registry.lease("m") as new:
            assert new.servable is not old.servable
    await trio.testing.wait_all_tasks_blocked()
    assert _states(registry) == {1: (AVAILABLE, "OK")}
    assert loader.open_versions == [("m", 1)]


async def test_a_version_retired_twice_ends_with_its_last_instance(tmp_path: Path, registry: Registry) -> None:
    spec = _spec(add_versions(tmp_path, 1))
    await registry.apply([spec])
    first = await registry.lease("m")
    await registry.apply([])
    await registry.apply([spec])
    with await registry.lease("m"):
        await registry.apply([])
        with first:
            pass
        await trio.testing.wait_all_tasks_blocked()
        assert _states(registry) == {1: (VersionState.UNLOADING, "OK")}
    await trio.testing.wait_all_tasks_blocked()
    assert _states(registry) == {1: (END, "OK")}
    assert not (await registry.apply([])).changed


async def test_a_missing_base_path_fails_the_model_until_it_exists(tmp_path: Path, registry: Registry) -> None:
    base = tmp_path / "nowhere"
    (failure,) = (await registry.apply([_spec(base)])).failures
    assert failure == VersionStatus("m", 0, LOADING, "UNKNOWN", failure.reason)
    assert "does not exist" in failure.reason
    base.mkdir()
    assert not (await registry.rescan()).failures
    assert registry.statuses() == {"m": []}
    add_versions(base, 1)
    assert not (await registry.rescan()).failures
    assert registry.available_versions("m") == [1]


async def test_a_base_path_that_vanishes_leaves_its_versions_serving(tmp_path: Path, registry: Registry) -> None:
    base = add_versions(tmp_path / "base", 1)
    await registry.apply([_spec(base)])
    base.rename(tmp_path / "moved")
    assert len((await registry.rescan()).failures) == 1
    assert registry.available_versions("m") == [1]
    assert registry.readiness.ready


async def test_of_two_models_with_one_name_the_first_is_served(tmp_path: Path, registry: Registry) -> None:
    first, second = add_versions(tmp_path / "a", 1), add_versions(tmp_path / "b", 2)
    await registry.apply([_spec(first), _spec(second)])
    assert registry.available_versions("m") == [1]


async def test_subscribers_receive_every_state_in_order(tmp_path: Path, loader: StubLoader, registry: Registry) -> None:
    loader.fail("m", 1)
    reported: list[tuple[int, VersionState, str]] = []
    registry.subscribe(lambda status: reported.append((status.version, status.state, status.error_code)))
    await registry.apply([_spec(add_versions(tmp_path, 1))])
    loader.recover("m", 1)
    await registry.rescan()
    await registry.apply([])
    await trio.testing.wait_all_tasks_blocked()
    failed = [(1, LOADING, "OK"), (1, LOADING, "UNKNOWN")]
    loaded = [(1, LOADING, "OK"), (1, AVAILABLE, "OK")]
    assert reported == [*failed, *loaded, (1, VersionState.UNLOADING, "OK"), (1, END, "OK")]


# Lookup by the text of a request


UNKNOWN_NAMES = ["unknown", "", "../m", "m/", "m\0", "%2e%2e", "m" * 100_000]
NO_INTEGERS = ["abc", "1.0", "1abc", " 1", "1_0", "٣", "0x1", "9223372036854775808", "9" * 10_000, "-", "../1"]


def _all_versions(base: Path, *versions: int) -> ModelSpec:
    return ModelSpec(name="m", base_path=add_versions(base, *versions), version_policy=AllVersions())


async def _refusal(registry: Registry, name: str, version: str) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await registry.lease(name, version)
    return caught.value


@pytest.mark.parametrize(
    ("requested", "served"),
    [("", "10"), ("0", "10"), ("9", "9"), ("10", "10"), ("010", "10"), ("+9", "9"), ("-0", "10")],
)
async def test_a_version_is_leased_by_number_at_once_and_the_default_is_the_highest(
    tmp_path: Path, requested: str, served: str, registry: Registry
) -> None:
    await registry.apply([_all_versions(tmp_path, 9, 10)])
    with trio.testing.assert_no_checkpoints():
        lease = await registry.lease("m", requested)
    with lease:
        assert (lease.name, lease.version) == ("m", served)
        assert lease.servable is registry.peek("m", requested)


@pytest.mark.parametrize(
    ("name", "version", "error", "message"),
    [
        *((name, "", ServiceMissing, f'nothing is served under the name "{cut(name, 80)}"') for name in UNKNOWN_NAMES),
        *(
            ("m", version, VersionMissing, f'version {version} of model "m" is not there')
            for version in ("2", "-1", "9223372036854775807")
        ),
    ],
)
async def test_an_unknown_name_or_version_is_refused_at_once_by_each_operation(
    tmp_path: Path, name: str, version: str, error: type[ServerError], message: str, registry: Registry
) -> None:
    await registry.apply([_all_versions(tmp_path, 1)])
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
    await registry.apply([_all_versions(tmp_path, 1)])
    assert isinstance(await _refusal(registry, "m", version), InvalidRequest)
    with pytest.raises(InvalidRequest, match=r"^Model version must be an integer"):
        registry.is_ready("m", version)


async def test_readiness_has_no_version_zero(tmp_path: Path, loader: StubLoader, registry: Registry) -> None:
    loader.fail("m", 2)
    await registry.apply([_all_versions(tmp_path, 1, 2)])
    assert registry.is_ready("m")
    assert registry.is_ready("m", "1")
    assert not registry.is_ready("m", "2")
    with pytest.raises(NotFound):
        registry.is_ready("m", "0")


async def test_a_retired_version_is_refused_as_retired_and_the_default_as_missing(
    tmp_path: Path, registry: Registry
) -> None:
    await registry.apply([_all_versions(tmp_path, 1)])
    (tmp_path / "1").rmdir()
    await registry.rescan()
    refusal = await _refusal(registry, "m", "1")
    assert (type(refusal), str(refusal)) == (VersionRetired, 'version 1 of model "m" is retired')
    refusal = await _refusal(registry, "m", "")
    assert (type(refusal), str(refusal)) == (VersionMissing, 'the default version of model "m" is not there')
    assert not registry.is_ready("m", "1")
    with pytest.raises(NotFound):
        registry.is_ready("m")


@pytest.mark.parametrize("version", ["", "1"])
async def test_a_lease_waits_for_a_load_ten_seconds_at_most(
    tmp_path: Path, version: str, loading: Loading, registry: Registry, autojump_clock: trio.testing.MockClock
) -> None:
    leased: list[str] = []

    async def call() -> None:
        with await registry.lease("m", version) as lease:
            leased.append(lease.version)

    async with loading(_all_versions(tmp_path, 1)) as nursery:
        started = trio.current_time()
        assert isinstance(await _refusal(registry, "m", "1"), VersionLoading)
        assert trio.current_time() - started == pytest.approx(10)
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        assert leased == []
        with pytest.raises(VersionLoading, match=r"of model \"m\" is not loaded yet$"):
            registry.peek("m", version)
    assert leased == ["1"]


async def test_a_failed_version_is_refused_with_a_hint_at_once_and_while_a_lease_waits(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    loader.fail("m", 1)
    refusals: list[ServerError] = []

    async def call(version: str) -> None:
        refusals.append(await _refusal(registry, "m", version))

    async with loading(_all_versions(tmp_path, 1)) as nursery:
        nursery.start_soon(call, "1")
        nursery.start_soon(call, "")
        await trio.testing.wait_all_tasks_blocked()
    assert {type(refusal) for refusal in refusals} == {VersionLoading, VersionMissing}
    refusal = await _refusal(registry, "m", "1")
    assert isinstance(refusal, VersionLoading)
    assert str(refusal) == 'version 1 of model "m" is not loaded yet: its last load failed'
    assert type(await _refusal(registry, "m", "")) is VersionMissing


async def test_a_cancelled_wait_holds_no_lease(tmp_path: Path, loading: Loading, registry: Registry) -> None:
    async with loading(_all_versions(tmp_path, 1)), trio.open_nursery() as callers:
        callers.start_soon(registry.lease, "m")
        await trio.testing.wait_all_tasks_blocked()
        callers.cancel_scope.cancel()
    with await registry.lease("m"):
        await registry.apply([])
        assert _states(registry) == {1: (VersionState.UNLOADING, "OK")}
    await trio.testing.wait_all_tasks_blocked()
    assert _states(registry) == {1: (END, "OK")}


# Readiness, polling and the end


async def _until(registry: Registry, name: str, versions: list[int]) -> None:
    while registry.available_versions(name) != versions:
        await registry.wait_change()


async def test_the_registry_is_ready_after_its_first_pass_and_stays_ready(
    tmp_path: Path, loading: Loading, registry: Registry
) -> None:
    reported: list[Readiness] = []
    registry.subscribe_readiness(reported.append)
    assert registry.readiness == Readiness(ready=False, reason="the configuration has not been applied yet")
    specs = [_spec(add_versions(tmp_path / name, 1), name=name) for name in ("a", "b", "c")]
    async with loading(*specs[:2], name="b"):
        await _until(registry, "a", [1])
        await trio.testing.wait_all_tasks_blocked()
        assert registry.readiness == Readiness(ready=False, reason="loading 1 of 2 models: b")
    assert registry.readiness == Readiness(ready=True)
    async with loading(*specs, name="c"):
        assert registry.readiness.ready
    assert reported == [Readiness(ready=False, reason="loading 1 of 2 models: b"), Readiness(ready=True)]


@pytest.mark.parametrize("requires", ["all", "started", "none"])
async def test_a_model_that_fails_at_the_start_keeps_the_server_unready_if_all_are_required(
    tmp_path: Path, loader: StubLoader, requires: ReadyRequires
) -> None:
    loader.fail("b", 1)
    async with running(registry_of(loader, poll_seconds=0, ready_requires=requires)) as registry:
        assert registry.readiness.ready is (requires == "none")
        good, bad = add_versions(tmp_path / "a", 1), add_versions(tmp_path / "b", 1)
        await registry.apply([_spec(good, name="a"), _spec(bad, name="b"), _spec(tmp_path / "c", name="c")])
        assert registry.readiness.ready is (requires != "all")
        if requires == "all":
            assert 'model "b": version 1: the stub is set to fail; model "c": ' in registry.readiness.reason
        await registry.apply([_spec(good, name="a")])
        assert registry.readiness.ready


@pytest.mark.parametrize("requires", ["all", "started", "none"])
async def test_a_model_that_was_available_and_is_gone_makes_the_server_unready(
    tmp_path: Path, requires: ReadyRequires
) -> None:
    async with running(registry_of(StubLoader(), poll_seconds=0, ready_requires=requires)) as registry:
        await registry.apply([_spec(add_versions(tmp_path / "a", 1), name="a")])
        assert registry.readiness.ready
        (tmp_path / "a" / "1").rmdir()
        await registry.rescan()
        assert registry.readiness.ready is (requires == "none")
        if requires != "none":
            assert registry.readiness.reason.startswith('model "a": ')
        add_versions(tmp_path / "a", 2)
        await registry.rescan()
        assert registry.readiness.ready


async def test_a_model_that_fails_when_it_is_added_counts_once_it_was_available(
    tmp_path: Path, loader: StubLoader, registry: Registry
) -> None:
    first = _spec(add_versions(tmp_path / "a", 1), name="a")
    added = _spec(add_versions(tmp_path / "b", 1), name="b")
    await registry.apply([first])
    loader.fail("b", 1)
    reported: list[Readiness] = []
    registry.subscribe_readiness(reported.append)
    result = await registry.apply([first, added, _spec(tmp_path / "missing", name="c")])
    assert sorted(status.name for status in result.failures) == ["b", "c"]
    await registry.apply([first, added])
    loader.recover("b", 1)
    await registry.rescan()
    assert reported == []
    (tmp_path / "b" / "1").rmdir()
    await registry.rescan()
    assert [(each.ready, 'model "b"' in each.reason) for each in reported] == [(False, True)]
    await registry.apply([first])
    await registry.apply([first, added])
    assert [each.ready for each in reported] == [False, True]


async def test_a_model_that_is_not_required_never_makes_the_server_unready(
    tmp_path: Path, loader: StubLoader, loading: Loading, registry: Registry
) -> None:
    first = _spec(add_versions(tmp_path / "a", 1), name="a")
    optional = _spec(add_versions(tmp_path / "b", 1), name="b").model_copy(update={"required": False})
    async with loading(first, optional, name="b"):
        await _until(registry, "a", [1])
        await trio.testing.wait_all_tasks_blocked()
        assert registry.readiness == Readiness(ready=True)
    (tmp_path / "b" / "1").rmdir()
    await registry.rescan()
    assert registry.readiness == Readiness(ready=True)
    await registry.apply([first, optional.model_copy(update={"required": True})])
    assert not registry.readiness.ready
    assert loader.attempts["b", 1] == 1


async def test_a_restarted_process_expects_what_the_others_expect(tmp_path: Path, loader: StubLoader) -> None:
    specs = [_spec(add_versions(tmp_path / name, 1), name=name) for name in ("a", "b")]
    async with running(registry_of(loader, poll_seconds=0)) as older:
        assert older.expected_services() is None
        await older.apply(specs[:1])
        loader.fail("b", 1)
        await older.apply(specs)
        expected = older.expected_services()
        assert expected == ["a"]
    async with running(registry_of(loader, poll_seconds=0)) as restarted:
        restarted.expect(expected)
        await restarted.apply(specs)
        assert restarted.readiness == Readiness(ready=True)
    loader.fail("a", 1)
    async with running(registry_of(loader, poll_seconds=0)) as restarted:
        restarted.expect(expected)
        await restarted.apply(specs)
        assert restarted.readiness.reason == 'model "a": version 1: the stub is set to fail'


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
        loader.recover("m", 1)
        began = trio.current_time()
        (tmp_path / "1" / "model.bin").touch()
        await _until(registry, "m", [1])
        assert trio.current_time() - began <= 2


async def test_files_that_cannot_be_served_are_retried_once_a_minute_until_they_change(
    tmp_path: Path, loader: StubLoader, autojump_clock: trio.testing.MockClock
) -> None:
    loader.fail("m", 1, ConfigError([Problem("OpenVINO cannot read the model")]))
    times: list[float] = []
    with capture_logs() as logs:
        async with running(registry_of(loader, poll_seconds=0.5)) as registry:
            registry.subscribe(lambda each: times.append(trio.current_time()) if each.error_code == "UNKNOWN" else None)
            await registry.apply([_spec(add_versions(tmp_path, 1))])
            while len(times) < 4:
                await registry.wait_change()
            pauses = [later - earlier for earlier, later in pairwise(times)]
            assert pauses[:2] == pytest.approx([1, 60], abs=0.6)
            (entry,) = repository_index(DataPlane(registry))
            assert (entry.state, entry.reason) == ("UNAVAILABLE", "OpenVINO cannot read the model")
            loader.recover("m", 1)
            began = trio.current_time()
            (tmp_path / "1" / "model.bin").touch()
            await _until(registry, "m", [1])
            assert trio.current_time() - began <= 2
    assert [line["event"] for line in logs].count("load failed") == 1


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
        specs = [_spec(add_versions(tmp_path / name, 1), name=name) for name in ("a", "b")]
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
            await registry.apply([_spec(add_versions(tmp_path / name, 1), name=name) for name in ("slow", "quick")])
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
