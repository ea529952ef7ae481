"""The operations that every protocol shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.dataplane import DataPlane
from ovmstrio.errors import InvalidRequest, NotFound, NotSupported
from ovmstrio.observability.events import CANCELLED, OK, RequestEvent
from ovmstrio.registry import Registry
from ovmstrio.request import InferRequest, InferResponse
from tests.support.stub_registry import StubLoader, StubServable, add_versions


class Recorder:
    """Remembers what it was told of requests."""

    def __init__(self) -> None:
        self.started: list[RequestEvent] = []
        self.finished: list[tuple[RequestEvent, str]] = []

    def request_started(self, event: RequestEvent) -> None:
        """Remember a start."""
        self.started.append(event)

    def request_finished(self, event: RequestEvent, code: str, error: BaseException | None) -> None:
        """Remember an end."""
        assert (error is None) == (code == OK)
        self.finished.append((event, code))

    @property
    def codes(self) -> list[str]:
        """How the requests ended."""
        return [code for _, code in self.finished]


class Failing(StubServable):
    """Refuses or waits for ever, as the request's id says."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Do what the id says."""
        if request.id == "wait":
            await trio.sleep_forever()
        raise InvalidRequest("no")


@pytest.fixture
def recorder() -> Recorder:
    """An observer."""
    return Recorder()


async def _plane(nursery: trio.Nursery, tmp_path: Path, recorder: Recorder, servable: type[StubServable]) -> DataPlane:
    async def load(spec: ModelSpec, version: int, directory: Path) -> StubServable:
        return servable(spec, version)

    registry = Registry(load, poll_seconds=0)
    await nursery.start(registry.run)
    plane = DataPlane(registry, observers=[recorder])
    (tmp_path / "m" / "3").mkdir(parents=True)
    await registry.apply([ModelSpec(name="m", base_path=tmp_path / "m")])
    return plane


async def test_an_answered_call_is_observed_with_the_version_that_served(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """Observers learn the start and the end, with the number that the default stood for."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    response = await plane.infer(InferRequest("m", id="7"), "REST")
    assert response.model_version == "3"
    (event,) = recorder.started
    assert (event.name, event.version, event.method, event.interface, event.request_id) == (
        "m",
        "3",
        "ModelInfer",
        "REST",
        "7",
    )
    assert recorder.finished == [(event, OK)]


async def test_a_refused_call_is_observed_under_its_error(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """The error reaches the caller unchanged and the observers by name."""
    plane = await _plane(nursery, tmp_path, recorder, Failing)
    with pytest.raises(InvalidRequest, match="no"):
        await plane.infer(InferRequest("m"), "gRPC")
    assert recorder.codes == ["InvalidRequest"]


async def test_a_cancelled_call_ends_for_its_observers_too(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """A client that leaves does not leave a request in process behind, nor a lease."""
    plane = await _plane(nursery, tmp_path, recorder, Failing)
    async with trio.open_nursery() as calls:
        calls.start_soon(plane.infer, InferRequest("m", id="wait"), "gRPC")
        await trio.testing.wait_all_tasks_blocked()
        calls.cancel_scope.cancel()
    assert recorder.codes == [CANCELLED]
    lease = await plane.registry.lease("m")
    with lease:
        assert lease.servable is plane.registry.peek("m")


async def test_unknown_names_are_not_observed(nursery: trio.Nursery, tmp_path: Path, recorder: Recorder) -> None:
    """A scanner's made-up names do not become metrics."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    with pytest.raises(NotFound):
        await plane.infer(InferRequest("nobody"), "gRPC")
    plane.count_unparsed("nobody", "", InvalidRequest("bad"), "REST")
    assert recorder.finished == []


async def test_a_body_that_cannot_be_read_counts_as_a_failed_call(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """The failure is counted where the model exists, under the version that would have served."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    for version in ("", "0", "3"):
        plane.count_unparsed("m", version, InvalidRequest("bad"), "REST")
    assert [(event.version, code) for event, code in recorder.finished] == [("3", "InvalidRequest")] * 3


async def test_readiness_follows_listeners_models_and_drain(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Ready means bound, loaded and not draining, and every change wakes who waits for one."""
    registry = Registry(StubLoader(), poll_seconds=0)
    await nursery.start(registry.run)
    plane = DataPlane(registry)
    assert plane.is_live()
    assert plane.readiness().reason == "the listeners are not bound yet"
    plane.begin_serving()
    assert not plane.readiness().ready
    spec = add_versions(tmp_path / "m", 1)
    del spec
    add_versions(tmp_path / "m", 1)
    await registry.apply([ModelSpec(name="m", base_path=tmp_path / "m")])
    assert plane.readiness().ready
    woken = []

    async def wait() -> None:
        await plane.wait_change()
        woken.append(plane.readiness().ready)

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    plane.begin_drain()
    await trio.testing.wait_all_tasks_blocked()
    assert woken == [False]
    assert plane.is_draining


async def test_a_server_without_a_source_has_nothing_to_reload(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Reloading is refused in words instead of doing nothing."""
    registry = Registry(StubLoader(), poll_seconds=0)
    await nursery.start(registry.run)
    with pytest.raises(NotSupported, match="no configuration"):
        await DataPlane(registry).reload_config()
