from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.config.specs import GraphSpec, ModelSpec
from ovmstrio.core.errors import (
    FailedPrecondition,
    GraphFailure,
    InvalidRequest,
    ModelFailure,
    NotFound,
    VersionMissing,
)
from ovmstrio.core.events import CANCELLED, OK, CallEvent, CallObserver
from ovmstrio.core.request import SEQUENCE_ID, InferRequest, InferResponse, RequestedOutput, ServableMetadata
from ovmstrio.core.tensor import BY_NAME, Tensor, TensorSpec
from ovmstrio.serving.broadcast_changes import ServerModelControl, handle_peer_change, server_model_control
from ovmstrio.serving.data_plane import CallObservers, DataPlane
from ovmstrio.serving.interfaces import KSERVE_GRPC, KSERVE_REST, TENSORFLOW_GRPC
from ovmstrio.serving.model_control import ModelControl
from ovmstrio.telemetry.metrics import Metrics
from tests.support.stub_registry import (
    GRAPH,
    StubLoader,
    StubServable,
    add_versions,
    load_scripted,
    registry_of,
    running,
)


class _Recorder(CallObserver):
    def __init__(self) -> None:
        self.started: list[CallEvent] = []
        self.finished: list[CallEvent] = []

    def call_started(self, event: CallEvent) -> None:
        assert event.code == ""
        self.started.append(event)

    def call_finished(self, event: CallEvent) -> None:
        assert (event.error is None) == (event.code == OK)
        self.finished.append(event)

    @property
    def codes(self) -> list[str]:
        return [event.code for event in self.finished]


class _Servable(StubServable):
    async def infer(self, request: InferRequest) -> InferResponse:
        if request.id == "refuse":
            raise InvalidRequest("no")
        if request.id == "wait":
            await trio.sleep_forever()
        return await super().infer(request)


@pytest.fixture
def recorder() -> _Recorder:
    return _Recorder()


@pytest.fixture
async def plane(nursery: trio.Nursery, tmp_path: Path, recorder: _Recorder) -> DataPlane:
    return await _plane(nursery, tmp_path, _Servable, recorder)


async def _plane(nursery: trio.Nursery, tmp_path: Path, servable: Callable[..., Any], *observers: Any) -> DataPlane:
    async def load(spec: ModelSpec, version: int, directory: Path) -> Any:
        return servable(spec, version)

    registry = registry_of(load, poll_seconds=0)
    await nursery.start(registry.run)
    await registry.apply([ModelSpec(name="m", base_path=add_versions(tmp_path / "m", 3))])
    return DataPlane(registry, observers=observers)


async def test_observers_get_the_version_that_served(plane: DataPlane, recorder: _Recorder) -> None:
    response = await plane.infer(InferRequest("m", id="7"), KSERVE_REST)
    assert response.model_version == "3"
    (event,) = recorder.started
    assert (event.name, event.version, event.kind, event.method) == ("m", "3", "model", "ModelInfer")
    assert (event.api_interface.api, event.api_interface.interface, event.request_id) == ("KServe", "REST", "7")
    assert (recorder.finished, event.code) == ([event], OK)
    assert event.seconds >= event.compute_seconds > 0
    with pytest.raises(InvalidRequest, match="no"):
        await plane.infer(InferRequest("m", id="refuse"), KSERVE_GRPC)
    assert recorder.codes == [OK, "InvalidRequest"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, [("call_started", ""), ("call_finished", "OK")]),
        (
            InvalidRequest("no"),
            [("call_started", ""), ("call_finished", "InvalidRequest"), ("call_failed", "InvalidRequest")],
        ),
    ],
)
def test_each_observer_gets_the_events_of_its_methods_and_failures_last(
    error: Exception | None, expected: list[Any]
) -> None:
    events: list[Any] = []

    def observer(method: str, *bases: type) -> Any:
        return type("Observer", bases, {method: lambda _, event: events.append((method, event.code))})()

    observers = CallObservers(
        [observer("call_failed", CallObserver), observer("call_finished", CallObserver), observer("call_started")]
    )
    event = CallEvent("m", "1", "model", KSERVE_REST, "ModelInfer")
    observers.start(event)
    observers.end(event, error)
    assert events == expected


async def test_cancelled_call_is_observed_and_holds_no_lease(plane: DataPlane, recorder: _Recorder) -> None:
    async with trio.open_nursery() as calls:
        calls.start_soon(plane.infer, InferRequest("m", id="wait"), KSERVE_GRPC)
        await trio.testing.wait_all_tasks_blocked()
        calls.cancel_scope.cancel()
    assert recorder.codes == [CANCELLED]
    with await plane.registry.lease("m") as lease:
        assert lease.servable is plane.registry.peek("m")


async def test_unknown_names_are_not_observed(plane: DataPlane, recorder: _Recorder) -> None:
    for call in (plane.infer(InferRequest("unknown"), KSERVE_GRPC), plane.describe("unknown", "", KSERVE_GRPC)):
        with pytest.raises(NotFound, match="Mediapipe graph definition with requested name is not found"):
            await call
    plane.count_unreadable_call("unknown", "", InvalidRequest("bad"), KSERVE_GRPC)
    assert recorder.finished == []
    plane.count_unreadable_call("m", "0", InvalidRequest("bad"), TENSORFLOW_GRPC)
    assert [(event.method, event.version, event.code) for event in recorder.finished] == [
        ("Predict", "3", "InvalidRequest")
    ]


@pytest.fixture
async def streams(tmp_path: Path, nursery: trio.Nursery, recorder: _Recorder) -> DataPlane:
    """Return a data plane of ``graph``, which has streams, and of the model ``echo``."""
    registry = registry_of(load_scripted, poll_seconds=0)
    await nursery.start(registry.run)
    plane = DataPlane(registry, observers=[recorder], metrics=Metrics())
    folder = add_versions(tmp_path / GRAPH, 1)
    graph = GraphSpec(name=GRAPH, base_path=folder, graph_path=folder / "graph.pbtxt")
    await registry.apply([graph, ModelSpec(name="echo", base_path=add_versions(tmp_path / "echo", 1))])
    return plane


def _request(**parameters: str | int) -> InferRequest:
    return InferRequest(GRAPH, parameters=dict(parameters))


def _counts(plane: DataPlane, method: str) -> dict[str, float]:
    text = plane.render_metrics() or b""
    api = "TensorFlowServing" if method == "Predict" else "KServe"
    labels = f'{{api="{api}",interface="gRPC",method="{method}",name="graph"}}'
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if labels in line]
    return {name.partition("{")[0].removeprefix("ovms_"): float(value) for name, value in lines if float(value)}


async def test_streams_are_observed_to_their_end(streams: DataPlane, recorder: _Recorder) -> None:
    async with streams.open_stream(InferRequest(GRAPH, "7", parameters={"replies": 2}), KSERVE_GRPC) as stream:
        await stream.send(_request(replies=1))
        stream.end()
        replies = [reply async for reply in stream]
        assert recorder.finished == []
    assert [isinstance(reply, InferResponse) for reply in replies] == [True] * 3
    servable: Any = streams.registry.peek(GRAPH)
    with trio.CancelScope() as scope:
        async with streams.open_stream(_request(hold=1), KSERVE_GRPC) as stream:
            await servable.holding.wait()
            scope.cancel()
            await stream.receive()
    assert [event.method for event in recorder.started] == ["ModelInferStream"] * 2
    assert recorder.codes == [OK, CANCELLED]
    assert _counts(streams, "ModelInferStream") == {"requests_accepted": 3, "responses": 3}
    assert servable.open == 0


@pytest.mark.parametrize(
    ("parameters", "error", "counts"),
    [
        ({"fail": "node"}, GraphFailure, {"requests_accepted": 1, "responses": 1, "graph_error": 1}),
        ({"refuse": "no"}, FailedPrecondition, {"requests_rejected": 1, "graph_error": 1}),
    ],
)
async def test_failed_stream_is_observed_and_counted(
    streams: DataPlane, recorder: _Recorder, parameters: dict[str, str], error: type[Exception], counts: dict[str, int]
) -> None:
    with pytest.raises(error):
        async with streams.open_stream(_request(**parameters), KSERVE_GRPC) as stream:
            assert len([reply async for reply in stream]) == 1
    assert recorder.codes == [error.__name__]
    assert _counts(streams, "ModelInferStream") == counts


async def test_calls_of_a_graph_are_counted_by_outcome(streams: DataPlane) -> None:
    await streams.infer(_request(), KSERVE_GRPC)
    with pytest.raises(GraphFailure):
        await streams.infer(_request(fail="node"), KSERVE_GRPC)
    with pytest.raises(FailedPrecondition):
        await streams.infer(_request(refuse="no"), KSERVE_GRPC)
    streams.count_unreadable_call(GRAPH, "", InvalidRequest("bad"), KSERVE_GRPC)
    counted = {"requests_accepted": 2, "requests_rejected": 2, "responses": 1, "graph_error": 2}
    assert _counts(streams, "ModelInfer") == counted
    await streams.infer(_request(), TENSORFLOW_GRPC)
    assert _counts(streams, "ModelInfer") == counted
    assert _counts(streams, "Predict") == {"requests_accepted": 1, "responses": 1}


class _Outputs:
    def __init__(self, declared: Sequence[str], answered: Sequence[str]) -> None:
        specs = tuple(TensorSpec(each, BY_NAME["FP32"], ()) for each in declared)
        self.metadata = ServableMetadata("m", "OpenVINO", (), specs)
        self._answered = answered
        self.calls = 0

    async def infer(self, request: InferRequest) -> InferResponse:
        self.calls += 1
        await trio.lowlevel.checkpoint()
        outputs = [Tensor(name, BY_NAME["FP32"], np.array(at, np.float32)) for at, name in enumerate(self._answered)]
        return InferResponse(request.model_name, "1", [*outputs], request.id)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def _requested(nursery: trio.Nursery, tmp_path: Path, servable: _Outputs, *names: str) -> list[tuple[str, float]]:
    plane = await _plane(nursery, tmp_path, lambda *_: servable)
    request = InferRequest("m", outputs=[RequestedOutput(name) for name in names])
    response = await plane.infer(request, KSERVE_GRPC)
    return [(each.name, float(each.array)) for each in response.outputs if isinstance(each, Tensor)]


async def test_requested_outputs_are_answered_once_in_their_order(nursery: trio.Nursery, tmp_path: Path) -> None:
    servable = _Outputs("abc", "abc")
    assert await _requested(nursery, tmp_path, servable, "c", "a", "c") == [("c", 2), ("a", 0)]
    with pytest.raises(InvalidRequest, match=r"^requested outputs: expected some of a, b, c, got nope$"):
        await _requested(nursery, tmp_path, servable, "a", "nope")
    assert servable.calls == 1
    # The outputs of some models are known from their answers only.
    with pytest.raises(InvalidRequest, match=r"^requested outputs: expected some of a, got b$"):
        await _requested(nursery, tmp_path, _Outputs("", "a"), "b")
    with pytest.raises(InvalidRequest, match=r"^requested outputs: expected some of y, got sequence_id$"):
        await _requested(nursery, tmp_path, _Outputs("y", "y"), SEQUENCE_ID)


def test_the_error_of_an_interface_does_not_change_the_raised_error() -> None:
    raised = VersionMissing('version 2 of model "m" is not there', tried=2, reason="no file")
    answered = KSERVE_GRPC.words(raised, "ModelInfer")
    assert type(answered) is VersionMissing
    assert answered.message == str(answered)
    assert answered.message == "Model with requested version is not found - the last load of version 2 failed: no file"
    assert raised.message == str(raised) == 'version 2 of model "m" is not there'


SECONDS = 60


class _Process:
    def __init__(self, folder: Path, *names: str) -> None:
        self.loader = StubLoader()
        self.registry = registry_of(self.loader)
        self.control = ModelControl(self.registry, can_undo=True)
        self.specs = [ModelSpec(name=name, base_path=folder / name) for name in names]
        self.peers: _Peer | None = None

    def served(self) -> list[str]:
        return [name for name in self.registry.statuses() if self.registry.available_versions(name)]


class _Peer:
    def __init__(self, plane: _Process) -> None:
        self._plane = plane
        self.is_slow = False

    async def call_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        del limit_seconds
        if self.is_slow and question == "load":
            await trio.sleep_forever()
        return [await handle_peer_change(cast("DataPlane", self._plane), question, arguments)]

    async def run_locked(self, work: Callable[[], Awaitable[None]]) -> None:
        await work()


def _control(plane: _Process) -> ServerModelControl:
    return server_model_control(cast("DataPlane", plane))


async def _load_all(folder: Path, *planes: _Process) -> None:
    for plane in planes:
        for spec in plane.specs:
            add_versions(folder / spec.name, 1)
        await plane.control.apply(plane.specs)


async def test_load_runs_in_all_processes_at_once_and_a_failure_undoes_it_in_all(tmp_path: Path) -> None:
    one, other = _Process(tmp_path, "a", "b"), _Process(tmp_path, "a", "b")
    one.peers = _Peer(other)
    async with running(one.registry), running(other.registry):
        await _load_all(tmp_path, one, other)
        gate = one.loader.hold("a", 1)

        async def open_gate() -> None:
            await other.loader.begun["a", 1].wait()
            gate.set()

        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_gate)
                await _control(one).load("a")
        assert (one.served(), other.served()) == (["a"], ["a"])
        for plane in (one, other):
            plane.loader.fail("b", 1)
            with pytest.raises(ModelFailure, match="set to fail"):
                await _control(one).load("b")
            assert (one.served(), other.served()) == (["a"], ["a"])
            plane.loader.recover("b", 1)


async def test_a_cancelled_load_is_undone(tmp_path: Path) -> None:
    process = _Process(tmp_path, "a", "b")
    async with running(process.registry):
        await _load_all(tmp_path, process)
        await process.control.load("b")
        gate = process.loader.hold("a", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.control.load, "a")
            with trio.fail_after(SECONDS):
                await process.loader.begun["a", 1].wait()
            nursery.cancel_scope.cancel()
            gate.set()
        assert [name for name, _, _ in await process.control.loads()] == process.served() == ["b"]
        await process.control.apply(process.specs)
        assert process.served() == ["b"]


async def test_cancelled_load_undoes_nothing_else(tmp_path: Path) -> None:
    one, other = _Process(tmp_path, "a", "b"), _Process(tmp_path, "a", "b")
    one.peers = _Peer(other)
    async with running(one.registry), running(other.registry):
        await _load_all(tmp_path, one, other)
        await _control(one).load("a")
        one.peers.is_slow = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_control(one).load, "b")
            with trio.fail_after(SECONDS):
                while "b" not in one.served():
                    await one.registry.wait_change()
            nursery.cancel_scope.cancel()
        assert (one.served(), other.served()) == (["a"], ["a"])
