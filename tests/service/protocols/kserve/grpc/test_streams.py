from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import grpc
import h2.events
import numpy as np
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.encoding.messages import message_class
from ovmstrio.serving.interfaces import KSERVE_GRPC
from tests.service.protocols.kserve.grpc.servers import (
    Caller,
    Serving,
    open_peer,
    payload,
    serving_grpc,
    start_stream,
    streaming_server,
)
from tests.support import ir
from tests.support.api_clients import BothInterfaces, call, serving_both, with_channel
from tests.support.servables import EXACT
from tests.support.stub_registry import FIRST_TIMESTAMP, PassThrough
from tests.support.waits import WAIT_SECONDS
from tests.unit.transport.grpc.bytes_client import message
from tests.unit.transport.grpc.peers import Peer

FAILURE = "Mediapipe execution failed. MP status - INTERNAL: node"
UNKNOWN = "Mediapipe graph definition with requested name is not found"


@pytest.fixture
async def streaming(tmp_path: Path) -> AsyncIterator[Serving]:
    async with streaming_server(tmp_path) as server:
        yield server


async def _called(streaming: Serving, work: Callable[[Caller], Any]) -> Any:
    return await with_channel(streaming.address, lambda channel: work(Caller(channel)))


@pytest.mark.parametrize(
    ("requests", "messages", "status", "text"),
    [
        pytest.param(
            [payload(data=b"last", replies=2, fail=FAILURE)], ["last", "last", FAILURE], "INVALID_ARGUMENT", FAILURE,
            id="failure after replies",
        ),
        pytest.param(
            [payload(data=b"fine"), payload(data=b"last", fail=FAILURE)], ["fine", "last", FAILURE],
            "INVALID_ARGUMENT", FAILURE, id="failure of a later request",
        ),
        pytest.param([payload(refuse="not started")], [], "FAILED_PRECONDITION", "not started", id="failure to open"),
        pytest.param([payload(model="nothing")], [], "NOT_FOUND", UNKNOWN, id="unknown graph"),
        pytest.param([payload(data=b"a"), payload(end=True)], ["a"], "OK", "", id="end by the graph"),
        pytest.param(
            [payload(data=b"a"), payload(problem="x is unexpected"), payload(data=b"b"), payload(end=True)],
            ["a", "x is unexpected", "b"], "OK", "", id="problem of one request",
        ),
    ],
)  # fmt: skip
async def test_a_stream_that_is_not_half_closed_gets_replies_errors_and_status(
    streaming: Serving, requests: list[bytes], messages: list[str], status: str, text: str
) -> None:
    def work(caller: Caller) -> Any:
        caller.send(*requests)
        return caller.finish()

    found, *end = await _called(streaming, work)
    texts = [each.error_message or bytes(each.infer_response.raw_output_contents[0]).decode() for each in found]
    assert (texts, *end) == (messages, status, text)
    errors = {FAILURE, "x is unexpected"}
    assert [each.HasField("infer_response") for each in found] == [each not in errors for each in messages]
    # A retirement waits for every lease.
    await streaming.registry.apply([])


async def test_a_reply_has_name_datatype_shape_and_timestamp_of_the_graph(streaming: Serving) -> None:
    def work(caller: Caller) -> Any:
        caller.send(payload(data=b"\x00\xff", name="größe"))
        caller.end()
        return caller.next().infer_response

    reply = await _called(streaming, work)
    (output,) = reply.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("größe", "words", [2, 7])
    assert list(reply.raw_output_contents) == [b"\x00\xff"]
    assert (reply.model_name, reply.model_version, reply.id) == ("graph", "1", "")
    assert {name: each.int64_param for name, each in reply.parameters.items()} == {"OVMS_MP_TIMESTAMP": FIRST_TIMESTAMP}


async def test_a_failure_after_the_half_close_is_reported_by_the_status_only(streaming: Serving) -> None:
    servable = streaming.servable
    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(data=b"x", fail=FAILURE, hold=True), end=True)
        await streaming.wait(servable.holding)
        servable.release()
        trailers = await peer.trailers(stream_id)
    assert (trailers["grpc-status"], trailers["grpc-message"]) == ("3", FAILURE)
    assert peer.body(stream_id).count(b"graph") == 1


async def test_malformed_requests_end_their_streams_and_are_logged_once(streaming: Serving) -> None:
    def work(caller: Caller) -> Any:
        caller.send(payload(data=b"a"))
        caller.next()
        caller.send(b"\x0a\xff")
        return caller.finish()

    with capture_logs() as logs:
        for _ in range(3):
            messages, status, text = await _called(streaming, work)
            assert (messages, status) == ([], "INVALID_ARGUMENT")
            assert "malformed inference.ModelInferRequest" in text
    (line,) = [each for each in logs if each["log_level"] != "debug"]
    assert (line["log_level"], line["event"], line["status"]) == ("info", "request decoding failed", "INVALID_ARGUMENT")
    assert "malformed inference.ModelInferRequest" in line["reason"]
    assert not any("exc_info" in each for each in logs)
    assert 'ovmstrio_requests_total{api="KServe",code="INVALID_ARGUMENT",interface="gRPC",' in streaming.metrics
    assert streaming.servable.open == 0


async def test_the_deadline_of_a_call_reaches_the_graph_and_ends_the_stream(streaming: Serving) -> None:
    def work(channel: Any) -> Any:
        caller = Caller(channel, timeout=2)
        caller.send(payload(hold=True))
        return caller.finish()

    _, status, _ = await with_channel(streaming.address, work)
    assert status == "DEADLINE_EXCEEDED"
    await streaming.wait(streaming.servable.cancelled)
    assert streaming.servable.streams[0].requests[0].deadline < float("inf")


async def _reset(peer: Peer, stream_id: int) -> None:
    peer.h2.reset_stream(stream_id, 8)
    await peer.flush()


async def _disconnect(peer: Peer, stream_id: int) -> None:
    await peer.stream.aclose()


@pytest.mark.parametrize(
    ("requests", "half_closed", "leave"),
    [
        pytest.param([payload(hold=True)], False, _reset, id="reset"),
        pytest.param([payload(hold=True)], True, _reset, id="reset after the half-close"),
        pytest.param([payload(hold=True), payload(), payload()], False, _disconnect, id="lost connection"),
    ],
)
async def test_a_client_that_leaves_cancels_a_graph_that_waits(
    streaming: Serving, requests: list[bytes], *, half_closed: bool, leave: Callable[[Peer, int], Awaitable[None]]
) -> None:
    servable = streaming.servable
    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, *requests, end=half_closed)
        await streaming.wait(servable.holding)
        await leave(peer, stream_id)
        await streaming.wait(servable.cancelled)
    await streaming.wait(servable.closed)
    assert servable.open == 0
    # A retirement waits for every lease.
    await streaming.registry.apply([])


async def test_requests_are_not_read_ahead_of_the_graph(streaming: Serving) -> None:
    servable = streaming.servable
    big = message(payload(data=b"x" * 16_000))
    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(data=b"first", hold=True))
        await streaming.wait(servable.holding)
        sent = 0
        while True:
            with trio.move_on_after(0.2):
                while peer.h2.local_flow_control_window(stream_id) < len(big):
                    await peer.read()
            if peer.h2.local_flow_control_window(stream_id) < len(big):
                break
            for start in range(0, len(big), 16_000):
                peer.h2.send_data(stream_id, big[start : start + 16_000])
            await peer.flush()
            sent += 1
        assert len(big) * sent <= 1024 * 1024
        assert len(servable.streams[0].requests) == 1
        servable.release()
        peer.h2.end_stream(stream_id)
        await peer.flush()
        await _read_all(peer, stream_id)
    assert len(servable.streams[0].requests) == sent + 1


async def _read_all(peer: Any, stream_id: int) -> None:
    credited = 0
    with trio.fail_after(WAIT_SECONDS):
        while not any(isinstance(e, h2.events.StreamEnded) and e.stream_id == stream_id for e in peer.events):
            come = len(peer.body(stream_id))
            if come > credited:
                peer.h2.acknowledge_received_data(come - credited, stream_id)
                credited = come
                await peer.flush()
            assert await peer.read()


async def test_a_graph_waits_for_a_slow_reader(streaming: Serving) -> None:
    servable = streaming.servable
    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(data=b"x" * 10_000, replies=200), end=True)
        left = await start_stream(peer, payload(data=b"x" * 10_000, replies=10_000))
        while len(peer.body(stream_id)) + len(peer.body(left)) < 65_535:
            assert await peer.read()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert max(stream.made for stream in servable.streams) < 30
        await _reset(peer, left)
        await streaming.wait(servable.cancelled)
        await _read_all(peer, stream_id)
    assert max(stream.made for stream in servable.streams) == 200


async def test_streams_are_served_until_the_grace_of_a_drain_ends(streaming: Serving) -> None:
    async with open_peer(streaming.address) as peer, trio.open_nursery() as nursery:
        stream_id = await start_stream(peer, payload(data=b"before"))
        await peer.wait_for(h2.events.DataReceived, stream_id)
        nursery.start_soon(streaming.front_end.drain, 0.7)
        while not any(isinstance(each, h2.events.ConnectionTerminated) for each in peer.events):
            assert await peer.read()
        peer.h2.send_data(stream_id, message(payload(data=b"during")))
        await peer.flush()
        while b"during" not in peer.body(stream_id):
            assert await peer.read()
        trailers = await peer.trailers(stream_id)
    assert trailers["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])


async def test_requests_and_replies_of_a_stream_are_counted(streaming: Serving) -> None:
    labels = '{api="KServe",interface="gRPC",method="ModelInferStream",name="graph"}'

    def work(caller: Caller) -> Any:
        for request in (payload(replies=3), payload(problem="p"), payload(replies=0), payload()):
            caller.send(request)
        for _ in range(5):
            caller.next()
        counted = trio.from_thread.run_sync(lambda: streaming.metrics)
        caller.send(payload(fail="no", replies=0))
        caller.finish()
        return counted

    during = await _called(streaming, work)
    await streaming.wait(streaming.servable.closed)
    assert f"ovms_responses{labels} 4.0" in during
    assert f"ovms_requests_rejected{labels} 1.0" in during
    assert f"ovms_requests_accepted{labels} 3.0" in during
    assert f"ovms_graph_error{labels} 0.0" in during
    after = streaming.metrics
    assert f"ovms_requests_accepted{labels} 4.0" in after
    assert f"ovms_graph_error{labels} 1.0" in after


async def test_a_unary_call_of_a_graph_is_answered_with_the_raw_output(streaming: Serving) -> None:
    service = "/inference.GRPCInferenceService/ModelInfer"
    response = await call(streaming.address, service, payload(data=b"\x01"), "inference.ModelInferResponse")
    assert (response.outputs[0].datatype, list(response.raw_output_contents)) == ("words", [b"\x01"])
    labels = '{api="KServe",interface="gRPC",method="ModelInfer",name="graph"}'
    assert f"ovms_requests_accepted{labels} 1.0" in streaming.metrics
    assert f"ovms_responses{labels} 1.0" in streaming.metrics


Request = message_class("inference.ModelInferRequest")


class GatedServable(PassThrough):
    def __init__(self, spec: ModelSpec, version: int) -> None:
        super().__init__(spec, version)
        self.gates: dict[Any, trio.Event] = defaultdict(trio.Event)
        self.arrived: dict[str, trio.Event] = defaultdict(trio.Event)
        self.done: list[str] = []
        self.ended: dict[str, trio.Event] = defaultdict(trio.Event)
        self.in_flight = 0
        self.most_under_way = 0

    async def infer(self, request: InferRequest) -> InferResponse:
        self.in_flight += 1
        self.most_under_way = max(self.most_under_way, self.in_flight)
        self.arrived[request.id].set()
        try:
            if "gate" in request.parameters:
                await self.gates[request.parameters["gate"]].wait()
            answer = await super().infer(request)
        finally:
            self.in_flight -= 1
        self.done.append(request.id)
        self.ended[request.id].set()
        return answer


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    async def load(spec: ModelSpec, version: int, directory: Path) -> GatedServable:
        return GatedServable(spec, version)

    (tmp_path / "echo" / "1").mkdir(parents=True)
    async with serving_grpc(load, [ModelSpec(name="echo", base_path=tmp_path / "echo")]) as server:
        yield server


async def stream_of(served: Serving, *requests: bytes) -> tuple[list[Any], str]:

    def work(channel: grpc.Channel) -> tuple[list[Any], str]:
        caller = Caller(channel)
        caller.send(*requests)
        caller.end()
        return caller.finish()[:2]

    return await with_channel(served.address, work)


def request(number: int, *, model: str = "echo", **parameters: Any) -> bytes:
    message = Request(model_name=model, id=str(number))
    message.inputs.add(name="x", datatype="FP32", shape=[1, 10])
    message.raw_input_contents.append(np.full(10, number, "<f4").tobytes())
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], field, value)
    serialised: bytes = message.SerializeToString()
    return serialised


def numbers(replies: list[Any]) -> list[float]:
    return [float(np.frombuffer(each.infer_response.raw_output_contents[0], "<f4")[0]) for each in replies]


async def test_concurrent_requests_of_a_stream_are_answered_in_order(served: Serving) -> None:
    servable = served.servable
    results: list[Any] = []

    async def ask() -> None:
        results.append(await stream_of(served, request(0), request(1, gate="slow"), request(2), request(3)))

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await servable.arrived["1"].wait()
            for number in ("0", "2", "3"):
                await servable.ended[number].wait()
            servable.gates["slow"].set()
    ((replies, status),) = results
    assert (numbers(replies), status) == ([0, 1, 2, 3], "OK")
    assert [each.infer_response.id for each in replies] == ["0", "1", "2", "3"]
    assert servable.done[-1] == "1"


async def test_at_most_sixteen_requests_of_a_stream_run_at_once(served: Serving) -> None:
    replies, status = await stream_of(served, *(request(number) for number in range(100)))
    assert (numbers(replies), status) == ([*range(100)], "OK")
    assert 1 < served.servable.most_under_way <= 16


async def test_errors_are_messages_with_the_id_of_their_request(served: Serving) -> None:
    replies, status = await stream_of(
        served, request(0), request(1, fail="it broke"), request(2, model="nothing"), request(3)
    )
    assert status == "OK"
    assert [each.error_message for each in replies] == [
        "",
        "it broke",
        "Mediapipe graph definition with requested name is not found",
        "",
    ]
    assert [each.infer_response.id for each in replies] == ["0", "1", "2", "3"]
    assert numbers([replies[0], replies[3]]) == [0, 3]


@pytest.mark.parametrize(("wanted", "marked"), [(True, [True, True]), (False, [None, None])])
async def test_the_final_response_is_marked_on_request(
    served: Serving, *, wanted: bool, marked: list[bool | None]
) -> None:
    options: dict[str, Any] = {"triton_enable_empty_final_response": wanted}
    replies, _ = await stream_of(served, request(0, **options), request(1, fail="it broke", **options))
    parameters = [each.infer_response.parameters for each in replies]
    found = [
        each["triton_final_response"].bool_param if "triton_final_response" in each else None for each in parameters
    ]
    assert found == marked


async def test_a_malformed_message_ends_the_stream_after_the_answers_to_earlier_requests(served: Serving) -> None:
    replies, status = await stream_of(served, request(0), request(1), b"\xff\xff\xff")
    assert (numbers(replies), status) == ([0, 1], "INVALID_ARGUMENT")


async def test_requests_of_a_client_that_leaves_are_cancelled(served: Serving) -> None:
    def work(channel: grpc.Channel) -> None:
        caller = Caller(channel)
        caller.send(request(0))
        caller.next()
        caller.send(request(1, block=True))
        trio.from_thread.run(served.servable.blocked.wait)
        caller.call.cancel()
        caller.end()

    await with_channel(served.address, work)
    await served.wait(served.servable.cancelled)
    assert (served.servable.done, served.servable.in_flight) == (["0"], 0)


@pytest.fixture
async def sequences(tmp_path: Path) -> AsyncIterator[BothInterfaces]:
    base = ir.save(ir.accumulator(), tmp_path, "sums")
    async with serving_both([ModelSpec(name="sums", base_path=base, stateful=True, plugin_config=EXACT)]) as both:
        yield both


def drive(client: Any, module: Any, steps: list[tuple[int | str, float, bool, bool]]) -> list[Any]:
    """Send all steps over one stream before an answer is read; return results and errors."""
    answers: SimpleQueue[Any] = SimpleQueue()
    client.start_stream(callback=lambda result, error: answers.put(error or result))
    for number, (identity, value, start, end) in enumerate(steps):
        given = module.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.full((1, 2), value, np.float32))
        client.async_stream_infer(
            "sums", [given], request_id=str(number), sequence_id=identity, sequence_start=start, sequence_end=end
        )
    try:
        return [answers.get(timeout=WAIT_SECONDS) for _ in steps]
    except Empty:
        pytest.fail("not every step was answered")
    finally:
        client.stop_stream()


@pytest.mark.parametrize("identities", [(7, 8), ("0f8fad5b-d9cb-469f-a165-70867728950e", "größe"), (9, "nine")])
async def test_two_sequences_are_interleaved_on_one_stream(
    sequences: BothInterfaces, identities: tuple[int | str, int | str]
) -> None:
    one, two = identities
    steps = [
        (one, 1.0, True, False),
        (two, 100.0, True, False),
        (one, 2.0, False, False),
        (two, 200.0, False, False),
        (one, 3.0, False, True),
        (two, 300.0, False, True),
    ]
    results = await sequences.with_triton("grpc", lambda client, module: drive(client, module, steps))
    assert [float(each.as_numpy("y")[0, 0]) for each in results] == [1, 100, 3, 300, 6, 600]
    assert [each.get_response().id for each in results] == [str(number) for number in range(6)]
    returned = [each.as_numpy("sequence_id")[0] for each in results]
    assert [each.decode() if isinstance(each, bytes) else int(each) for each in returned] == [one, two] * 3


async def start_sequence(sequences: BothInterfaces, identity: int | str) -> Any:
    def work(client: Any, module: Any) -> Any:
        given = module.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.ones((1, 2), np.float32))
        return client.infer("sums", [given], sequence_id=identity, sequence_start=True).as_numpy("sequence_id").tolist()

    return await sequences.with_triton("grpc", work)


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        ("12", 12),
        (12, 12),
        ("twelve", b"twelve"),
        ("-1", b"-1"),
        ("18446744073709551616", b"18446744073709551616"),
    ],
)
async def test_texts_of_digits_are_numeric_sequence_ids(
    sequences: BothInterfaces, identity: int | str, found: int | bytes
) -> None:
    assert await start_sequence(sequences, identity) == [found]
    (alive,) = sequences.plane.sequences("sums", "", KSERVE_GRPC)
    assert alive.id == (found.decode() if isinstance(found, bytes) else found)


async def test_a_sequence_id_has_at_most_256_characters(sequences: BothInterfaces) -> None:
    with pytest.raises(InferenceServerException, match="a text of at most 256 characters"):
        await start_sequence(sequences, "x" * 257)
