"""The operations that every protocol shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.api.doors import KSERVE_GRPC, KSERVE_REST, TENSORFLOW_GRPC, TENSORFLOW_REST
from ovmstrio.config.specs import GraphSpec, ModelSpec
from ovmstrio.core.errors import FailedPrecondition, GraphFailure, InvalidRequest, NotFound, NotSupported
from ovmstrio.core.events import CANCELLED, OK, CallEvent, CallObserver, Door, Step
from ovmstrio.core.request import InferRequest, InferResponse, StreamProblem
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from tests.support.streaming_servables import GRAPH, ScriptedServable, load_scripted
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of


class Recorder(CallObserver):
    """Remembers what it was told of requests."""

    def __init__(self) -> None:
        self.started: list[CallEvent] = []
        self.finished: list[CallEvent] = []
        self.steps: list[Step] = []

    def call_started(self, event: CallEvent) -> None:
        """Remember a start."""
        assert event.code == ""
        self.started.append(event)

    def call_moved(self, event: CallEvent, step: Step) -> None:
        """Remember a step."""
        self.steps.append(step)

    def call_finished(self, event: CallEvent) -> None:
        """Remember an end."""
        assert (event.error is None) == (event.code == OK)
        self.finished.append(event)

    @property
    def codes(self) -> list[str]:
        """How the requests ended."""
        return [event.code for event in self.finished]


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

    registry = registry_of(load, poll_seconds=0)
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
    response = await plane.infer(InferRequest("m", id="7"), KSERVE_REST)
    assert response.model_version == "3"
    (event,) = recorder.started
    assert (event.name, event.version, event.kind, event.method) == ("m", "3", "model", "ModelInfer")
    assert (event.door.api, event.door.interface, event.request_id) == ("KServe", "REST", "7")
    assert recorder.finished == [event]
    assert event.code == OK
    assert event.seconds >= event.compute_seconds > 0


async def test_a_refused_call_is_observed_under_its_error(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """The error reaches the caller unchanged and the observers by name."""
    plane = await _plane(nursery, tmp_path, recorder, Failing)
    with pytest.raises(InvalidRequest, match="no"):
        await plane.infer(InferRequest("m"), KSERVE_GRPC)
    assert recorder.codes == ["InvalidRequest"]


async def test_a_cancelled_call_ends_for_its_observers_too(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """A client that leaves does not leave a request in process behind, nor a lease."""
    plane = await _plane(nursery, tmp_path, recorder, Failing)
    async with trio.open_nursery() as calls:
        calls.start_soon(plane.infer, InferRequest("m", id="wait"), KSERVE_GRPC)
        await trio.testing.wait_all_tasks_blocked()
        calls.cancel_scope.cancel()
    assert recorder.codes == [CANCELLED]
    lease = await plane.registry.lease("m")
    with lease:
        assert lease.servable is plane.registry.peek("m")


async def test_calls_of_tensorflow_serving_have_its_names(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """Observers learn the method that the caller's API has; what the servable does is the same."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    await plane.infer(InferRequest("m"), TENSORFLOW_REST)
    assert plane.model_metadata("m", "", TENSORFLOW_GRPC).serving == "3"
    assert [status.version for status in plane.model_status("m", 0, TENSORFLOW_GRPC)] == [3]
    plane.count_unparsed("m", "", InvalidRequest("bad"), TENSORFLOW_REST)
    events = [(event.method, event.door.api, event.door.interface) for event in recorder.finished]
    assert events == [
        ("Predict", "TensorFlowServing", "REST"),
        ("GetModelMetadata", "TensorFlowServing", "gRPC"),
        ("GetModelStatus", "TensorFlowServing", "gRPC"),
        ("Predict", "TensorFlowServing", "REST"),
    ]


@pytest.mark.parametrize(
    ("door", "text"),
    [
        (KSERVE_GRPC, "Mediapipe graph definition with requested name is not found"),
        (KSERVE_REST, "Mediapipe graph definition with requested name is not found"),
        (TENSORFLOW_GRPC, "Pipeline with requested name is not found"),
        (TENSORFLOW_REST, "Model with requested name is not found"),
    ],
)
async def test_an_unknown_name_is_told_in_the_words_of_the_way_it_came(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder, door: Door, text: str
) -> None:
    """OVMS's texts differ by what each API looks for last, for calls and for what comes before them."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    with pytest.raises(NotFound, match=text):
        await plane.infer(InferRequest("nobody"), door)
    with pytest.raises(NotFound, match=text):
        await plane.describe("nobody", "", door)


async def test_unknown_names_are_not_observed(nursery: trio.Nursery, tmp_path: Path, recorder: Recorder) -> None:
    """A scanner's made-up names do not become metrics."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    with pytest.raises(NotFound):
        await plane.infer(InferRequest("nobody"), KSERVE_GRPC)
    plane.count_unparsed("nobody", "", InvalidRequest("bad"), KSERVE_REST)
    assert recorder.finished == []


async def test_a_body_that_cannot_be_read_counts_as_a_failed_call(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """The failure is counted where the model exists, under the version that would have served."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    for version in ("", "0", "3"):
        plane.count_unparsed("m", version, InvalidRequest("bad"), KSERVE_REST)
    assert [(event.version, event.code) for event in recorder.finished] == [("3", "InvalidRequest")] * 3


async def test_readiness_follows_listeners_models_and_drain(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Ready means bound, loaded and not draining, and every change wakes who waits for one."""
    registry = registry_of(StubLoader(), poll_seconds=0)
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
    registry = registry_of(StubLoader(), poll_seconds=0)
    await nursery.start(registry.run)
    with pytest.raises(NotSupported, match="no configuration"):
        await DataPlane(registry).reload_config()


# Streams


@pytest.fixture
async def streams(tmp_path: Path, nursery: trio.Nursery, recorder: Recorder) -> DataPlane:
    """A data plane with ``graph``, which can be streamed to, and the model ``echo``."""
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
    """Give what has been counted of the graph over gRPC, by family."""
    text = plane.render_metrics() or b""
    api = "TensorFlowServing" if method == "Predict" else "KServe"
    labels = f'{{api="{api}",interface="gRPC",method="{method}",name="graph"}}'
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if labels in line]
    return {name.partition("{")[0].removeprefix("ovms_"): float(value) for name, value in lines if float(value)}


async def test_a_stream_is_leased_and_observed_to_its_end(streams: DataPlane, recorder: Recorder) -> None:
    """Replies come out, whatever version is asked for, and observers learn the start and the end."""
    async with streams.open_stream(InferRequest(GRAPH, "7", parameters={"replies": 2}), KSERVE_GRPC) as stream:
        await stream.send(_request(replies=1))
        stream.end()
        replies = [reply async for reply in stream]
        assert recorder.finished == []

    assert [isinstance(reply, InferResponse) for reply in replies] == [True] * 3
    assert [event.method for event in recorder.started] == ["ModelInferStream"]
    assert recorder.codes == [OK]
    assert _counts(streams, "ModelInferStream") == {"requests_accepted": 2, "responses": 3}


async def test_a_request_that_was_a_problem_is_counted_as_rejected(streams: DataPlane) -> None:
    """Requests that the stream could not take in are no accepted ones, the first included."""
    async with streams.open_stream(_request(problem="a"), KSERVE_GRPC) as stream:
        assert await stream.receive() == StreamProblem("a")
        await stream.send(_request())
        await stream.receive()
        await stream.send(_request(problem="b"))
        stream.end()
        assert [reply async for reply in stream] == [StreamProblem("b")]

    assert _counts(streams, "ModelInferStream") == {"requests_accepted": 1, "requests_rejected": 2, "responses": 1}


async def test_a_silent_request_is_counted_while_the_stream_is_open(streams: DataPlane) -> None:
    """A request that is taken in without a reply counts at once when somebody waits for replies."""
    async with streams.open_stream(_request(replies=0), KSERVE_GRPC) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(anext, stream, None)
        await trio.testing.wait_all_tasks_blocked()
        await stream.send(_request(replies=0))
        assert _counts(streams, "ModelInferStream") == {"requests_accepted": 2}
        stream.end()


async def test_a_stream_that_fails_tells_why_on_leaving(streams: DataPlane, recorder: Recorder) -> None:
    """Replies end, and leaving the block raises the failure unchanged."""
    with pytest.raises(GraphFailure, match="node"):
        async with streams.open_stream(_request(fail="node"), KSERVE_GRPC) as stream:
            assert len([reply async for reply in stream]) == 1

    assert recorder.codes == ["GraphFailure"]
    assert _counts(streams, "ModelInferStream") == {"requests_accepted": 1, "responses": 1, "graph_error": 1}


async def test_a_stream_that_cannot_begin_is_rejected(streams: DataPlane, recorder: Recorder) -> None:
    """An error on opening is the caller's answer and counts as such."""
    with pytest.raises(FailedPrecondition, match="no"):
        async with streams.open_stream(_request(refuse="no"), KSERVE_GRPC):
            pytest.fail("it began")

    assert recorder.codes == ["FailedPrecondition"]
    assert _counts(streams, "ModelInferStream") == {"requests_rejected": 1, "graph_error": 1}


async def test_a_stream_that_is_cancelled_gives_its_lease_back(streams: DataPlane, recorder: Recorder) -> None:
    """A cancelled stream is observed as such, is no error of the graph, and holds nothing."""
    servable = streams.registry.peek(GRAPH)
    assert isinstance(servable, ScriptedServable)
    with trio.CancelScope() as scope:
        async with streams.open_stream(_request(hold=1), KSERVE_GRPC) as stream:
            await servable.holding.wait()
            scope.cancel()
            await stream.receive()

    assert recorder.codes == [CANCELLED]
    assert _counts(streams, "ModelInferStream") == {"requests_accepted": 1}
    await streams.registry.apply([])
    assert servable.open == 0


@pytest.mark.parametrize("name", ["echo", "nobody"])
async def test_only_what_has_streams_can_be_streamed_to(streams: DataPlane, recorder: Recorder, name: str) -> None:
    """Models and unknown names are refused in OVMS's words, and not observed."""
    with pytest.raises(NotFound, match="Mediapipe graph definition with requested name is not found"):
        async with streams.open_stream(InferRequest(name), KSERVE_GRPC):
            pytest.fail("it began")
    assert recorder.started == []


async def test_a_name_is_described_by_its_inputs(streams: DataPlane) -> None:
    """What a caller must know is told of graphs and models, outputs as well."""
    graph, model = await streams.describe(GRAPH, "", KSERVE_REST), await streams.describe("echo", "1", KSERVE_REST)
    assert ([spec.name for spec in graph.inputs], graph.has_streams) == (["x", "y"], True)
    assert ([spec.name for spec in model.inputs], model.has_streams) == (["text", "x"], False)
    assert [spec.name for spec in model.outputs] == ["text", "x"]


async def test_calls_of_a_graph_move_its_own_counters(streams: DataPlane) -> None:
    """One answered, one failed and one whose body could not be read."""
    await streams.infer(_request(), KSERVE_GRPC)
    with pytest.raises(GraphFailure):
        await streams.infer(_request(fail="node"), KSERVE_GRPC)
    with pytest.raises(FailedPrecondition):
        await streams.infer(_request(refuse="no"), KSERVE_GRPC)
    streams.count_unparsed(GRAPH, "", InvalidRequest("bad"), KSERVE_GRPC)

    counted = {"requests_accepted": 2, "requests_rejected": 2, "responses": 1, "graph_error": 2}
    assert _counts(streams, "ModelInfer") == counted
    await streams.infer(_request(), TENSORFLOW_GRPC)
    assert _counts(streams, "ModelInfer") == counted
    assert _counts(streams, "Predict") == {"requests_accepted": 1, "responses": 1}
