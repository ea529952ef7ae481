"""The operations that every protocol shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import FailedPrecondition, GraphFailure, InvalidRequest, NotFound, NotSupported
from ovmstrio.core.events import API_OF, CANCELLED, OK, Api, Interface, Method, RequestEvent
from ovmstrio.core.request import InferRequest, InferResponse, StreamProblem
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from tests.support.streaming_servables import GRAPH, ScriptedServable, load_scripted
from tests.support.stub_registry import StubLoader, StubServable, add_versions, registry_of


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


async def test_calls_of_tensorflow_serving_have_its_names(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder
) -> None:
    """Observers learn the method that the caller's API has; what the servable does is the same."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    await plane.infer(InferRequest("m"), "REST", "TensorFlowServing")
    assert plane.model_metadata("m", "", "gRPC", "TensorFlowServing").serving == "3"
    assert [status.version for status in plane.model_status("m", 0, "gRPC")] == [3]
    plane.count_unparsed("m", "", InvalidRequest("bad"), "REST", "TensorFlowServing")
    events = [(event.method, API_OF[event.method], event.interface) for event, _ in recorder.finished]
    assert events == [
        ("Predict", "TensorFlowServing", "REST"),
        ("GetModelMetadata", "TensorFlowServing", "gRPC"),
        ("GetModelStatus", "TensorFlowServing", "gRPC"),
        ("Predict", "TensorFlowServing", "REST"),
    ]


@pytest.mark.parametrize(
    ("interface", "api", "text"),
    [
        ("gRPC", "KServe", "Mediapipe graph definition with requested name is not found"),
        ("REST", "KServe", "Mediapipe graph definition with requested name is not found"),
        ("gRPC", "TensorFlowServing", "Pipeline with requested name is not found"),
        ("REST", "TensorFlowServing", "Model with requested name is not found"),
    ],
)
async def test_an_unknown_name_is_told_in_the_words_of_the_way_it_came(
    nursery: trio.Nursery, tmp_path: Path, recorder: Recorder, interface: Interface, api: Api, text: str
) -> None:
    """OVMS's texts differ by what each API looks for last, for calls and for what comes before them."""
    plane = await _plane(nursery, tmp_path, recorder, StubServable)
    with pytest.raises(NotFound, match=text):
        await plane.infer(InferRequest("nobody"), interface, api)
    with pytest.raises(NotFound, match=text):
        await plane.describe("nobody", "", interface, api)


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
    specs = [ModelSpec(name=name, base_path=add_versions(tmp_path / name, 1)) for name in (GRAPH, "echo")]
    await registry.apply(specs)
    return plane


def _request(**parameters: str | int) -> InferRequest:
    return InferRequest(GRAPH, parameters=dict(parameters))


def _counts(plane: DataPlane, method: Method) -> dict[str, float]:
    """Give what has been counted of the graph over gRPC, by family."""
    text = plane.render_metrics() or b""
    api = API_OF[method]
    labels = f'{{api="{api}",interface="gRPC",method="{method}",name="graph"}}'
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if labels in line]
    return {name.partition("{")[0].removeprefix("ovms_"): float(value) for name, value in lines if float(value)}


async def test_a_stream_is_leased_and_observed_to_its_end(streams: DataPlane, recorder: Recorder) -> None:
    """Replies come out, whatever version is asked for, and observers learn the start and the end."""
    async with streams.open_stream(InferRequest(GRAPH, "7", parameters={"replies": 2}), "gRPC") as stream:
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
    async with streams.open_stream(_request(problem="a"), "gRPC") as stream:
        assert await stream.receive() == StreamProblem("a")
        await stream.send(_request())
        await stream.receive()
        await stream.send(_request(problem="b"))
        stream.end()
        assert [reply async for reply in stream] == [StreamProblem("b")]

    assert _counts(streams, "ModelInferStream") == {"requests_accepted": 1, "requests_rejected": 2, "responses": 1}


async def test_a_silent_request_is_counted_while_the_stream_is_open(streams: DataPlane) -> None:
    """A request that is taken in without a reply counts at once when somebody waits for replies."""
    async with streams.open_stream(_request(replies=0), "gRPC") as stream, trio.open_nursery() as nursery:
        nursery.start_soon(anext, stream, None)
        await trio.testing.wait_all_tasks_blocked()
        await stream.send(_request(replies=0))
        assert _counts(streams, "ModelInferStream") == {"requests_accepted": 2}
        stream.end()


async def test_a_stream_that_fails_tells_why_on_leaving(streams: DataPlane, recorder: Recorder) -> None:
    """Replies end, and leaving the block raises the failure unchanged."""
    with pytest.raises(GraphFailure, match="node"):
        async with streams.open_stream(_request(fail="node"), "gRPC") as stream:
            assert len([reply async for reply in stream]) == 1

    assert recorder.codes == ["GraphFailure"]
    assert _counts(streams, "ModelInferStream") == {"requests_accepted": 1, "responses": 1, "graph_error": 1}


async def test_a_stream_that_cannot_begin_is_rejected(streams: DataPlane, recorder: Recorder) -> None:
    """An error on opening is the caller's answer and counts as such."""
    with pytest.raises(FailedPrecondition, match="no"):
        async with streams.open_stream(_request(refuse="no"), "gRPC"):
            pytest.fail("it began")

    assert recorder.codes == ["FailedPrecondition"]
    assert _counts(streams, "ModelInferStream") == {"requests_rejected": 1, "graph_error": 1}


async def test_a_stream_that_is_cancelled_gives_its_lease_back(streams: DataPlane, recorder: Recorder) -> None:
    """A cancelled stream is observed as such, is no error of the graph, and holds nothing."""
    servable = streams.registry.peek(GRAPH)
    assert isinstance(servable, ScriptedServable)
    with trio.CancelScope() as scope:
        async with streams.open_stream(_request(hold=1), "gRPC") as stream:
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
        async with streams.open_stream(InferRequest(name), "gRPC"):
            pytest.fail("it began")
    assert recorder.started == []


async def test_a_name_is_described_by_its_inputs(streams: DataPlane) -> None:
    """What a caller must know is told of graphs and models, outputs as well."""
    graph, model = await streams.describe(GRAPH), await streams.describe("echo", "1")
    assert ([spec.name for spec in graph.inputs], graph.has_streams) == (["x", "y"], True)
    assert ([spec.name for spec in model.inputs], model.has_streams) == (["text", "x"], False)
    assert [spec.name for spec in model.outputs] == ["text", "x"]


async def test_calls_of_a_graph_move_its_own_counters(streams: DataPlane) -> None:
    """One answered, one failed and one whose body could not be read."""
    await streams.infer(_request(), "gRPC")
    with pytest.raises(GraphFailure):
        await streams.infer(_request(fail="node"), "gRPC")
    with pytest.raises(FailedPrecondition):
        await streams.infer(_request(refuse="no"), "gRPC")
    streams.count_unparsed(GRAPH, "", InvalidRequest("bad"), "gRPC")

    counted = {"requests_accepted": 2, "requests_rejected": 2, "responses": 1, "graph_error": 2}
    assert _counts(streams, "ModelInfer") == counted
    await streams.infer(_request(), "gRPC", "TensorFlowServing")
    assert _counts(streams, "ModelInfer") == counted
    assert _counts(streams, "Predict") == {"requests_accepted": 1, "responses": 1}
