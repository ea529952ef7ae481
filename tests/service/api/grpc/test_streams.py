from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import h2.events
import numpy as np
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.service.api.grpc.servers import Caller, Serving, open_peer, payload, start_stream, streaming_server
from tests.support.grpc_clients import call, with_channel, with_triton
from tests.support.streaming_servables import FIRST_TIMESTAMP
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.bytes_client import message

FAILURE = "Mediapipe execution failed. MP status - INTERNAL: node"
UNKNOWN = "Mediapipe graph definition with requested name is not found"


@pytest.fixture
async def streaming(tmp_path: Path) -> AsyncIterator[Serving]:
    async with streaming_server(tmp_path) as server:
        yield server


async def _called(streaming: Serving, work: Callable[[Caller], Any]) -> Any:
    return await with_channel(streaming.address, lambda channel: work(Caller(channel)))


def _texts(messages: list[Any]) -> list[str]:
    return [each.error_message or bytes(each.infer_response.raw_output_contents[0]).decode() for each in messages]


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
    assert (_texts(found), *end) == (messages, status, text)
    errors = {FAILURE, "x is unexpected"}
    assert [each.HasField("infer_response") for each in found] == [each not in errors for each in messages]


async def test_each_reply_arrives_before_the_next_request(streaming: Serving) -> None:
    def work(caller: Caller) -> Any:
        replies = []
        for text in (b"one", b"two", b"three"):
            caller.send(payload(data=text))
            replies.append(caller.next())
        caller.end()
        return replies, caller.finish()

    replies, (rest, status, _) = await _called(streaming, work)
    assert (_texts(replies), rest, status) == (["one", "two", "three"], [], "OK")


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
    assert (line["log_level"], line["event"], line["status"]) == ("info", "request cannot be read", "INVALID_ARGUMENT")
    assert "malformed inference.ModelInferRequest" in line["reason"]
    assert not any("exc_info" in each for each in logs)
    assert 'ovmstrio_requests_total{api="KServe",code="INVALID_ARGUMENT",interface="gRPC",' in streaming.metrics
    assert streaming.servable.open == 0


async def test_many_replies_arrive_in_order(streaming: Serving) -> None:
    def work(caller: Caller) -> Any:
        caller.send(payload(data=b"x" * 500, replies=3_000))
        caller.end()
        return caller.finish()

    messages, status, _ = await _called(streaming, work)
    stamps = [each.infer_response.parameters["OVMS_MP_TIMESTAMP"].int64_param for each in messages]
    assert status == "OK"
    assert stamps == list(range(FIRST_TIMESTAMP, FIRST_TIMESTAMP + 3_000))


async def test_the_deadline_of_a_call_reaches_the_graph_and_ends_the_stream(streaming: Serving) -> None:
    def work(channel: Any) -> Any:
        caller = Caller(channel, timeout=2)
        caller.send(payload(hold=True))
        return caller.finish()

    _, status, _ = await with_channel(streaming.address, work)
    assert status == "DEADLINE_EXCEEDED"
    await streaming.wait(streaming.servable.cancelled)
    assert streaming.servable.streams[0].requests[0].deadline < float("inf")


@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_reset_cancels_a_graph_that_waits(streaming: Serving, *, half_closed: bool) -> None:
    servable = streaming.servable
    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(hold=True), end=half_closed)
        await streaming.wait(servable.holding)
        peer.h2.reset_stream(stream_id, 8)
        await peer.flush()
        await streaming.wait(servable.cancelled)
    await streaming.wait(servable.closed)
    assert servable.open == 0


async def test_a_reset_cancels_a_graph_whose_replies_wait_for_the_window(streaming: Serving) -> None:
    servable = streaming.servable
    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(data=b"x" * 10_000, replies=10_000))
        while len(peer.body(stream_id)) < 65_535:
            assert await peer.read()
        assert servable.open == 1
        peer.h2.reset_stream(stream_id, 8)
        await peer.flush()
        await streaming.wait(servable.cancelled)


async def test_a_lost_connection_cancels_the_graph(streaming: Serving) -> None:
    servable = streaming.servable
    async with open_peer(streaming.address) as peer:
        await start_stream(peer, payload(hold=True), payload(), payload())
        await streaming.wait(servable.holding)
    await streaming.wait(servable.cancelled)


async def test_a_graph_can_be_retired_after_streams_of_all_outcomes(streaming: Serving) -> None:
    def work(channel: Any) -> None:
        for request in (payload(), payload(fail="no"), payload(refuse="no"), payload(problem="no")):
            caller = Caller(channel)
            caller.send(request)
            caller.end()
            caller.finish()
        left = Caller(channel)
        left.send(payload(hold=True))
        streaming_held.get(timeout=WAIT_SECONDS)
        left.call.cancel()
        left.end()

    streaming_held: SimpleQueue[bool] = SimpleQueue()
    servable = streaming.servable
    async with trio.open_nursery() as nursery:
        nursery.start_soon(with_channel, streaming.address, work)
        await streaming.wait(servable.holding)
        streaming_held.put(True)
    await streaming.wait(servable.cancelled)
    with trio.fail_after(WAIT_SECONDS):
        await streaming.registry.apply([])
    assert servable.open == 0


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


async def test_a_graph_waits_for_a_slow_reader(streaming: Serving) -> None:
    servable = streaming.servable
    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(data=b"x" * 10_000, replies=200), end=True)
        while len(peer.body(stream_id)) < 65_535:
            assert await peer.read()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert servable.streams[0].made < 30
        await _read_all(peer, stream_id)
    assert servable.streams[0].made == 200


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


async def test_tritonclient_gets_replies_problems_and_the_failure(streaming: Serving) -> None:
    from tritonclient.grpc import InferInput

    text = InferInput("x", [2], "BYTES")
    text.set_data_from_numpy(np.array([b"a", b"b"], object))

    def work(client: Any) -> list[Any]:
        answers: SimpleQueue[Any] = SimpleQueue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        for parameters in ({}, {"problem": "bad one"}, {"fail": FAILURE}):
            client.async_stream_infer("graph", [text], parameters=parameters)
        seen = [answers.get(timeout=WAIT_SECONDS) for _ in range(5)]
        client.stop_stream()
        return seen

    first, problem, second, text_of_failure, failure = await with_triton(streaming.address, work)
    assert first[0].as_numpy("x").tolist() == second[0].as_numpy("x").tolist() == [b"a", b"b"]
    assert str(problem[1]) == "bad one"
    assert str(text_of_failure[1]) == FAILURE
    assert failure[1].status() == "StatusCode.INVALID_ARGUMENT"


async def test_an_asyncio_client_gets_replies_and_the_failure(streaming: Serving) -> None:
    import asyncio

    async def talk() -> tuple[list[bytes], Any]:
        async with grpc.aio.insecure_channel(streaming.address) as channel:
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(timeout=WAIT_SECONDS)
            await stream.write(payload(data=b"hello"))
            received = [await stream.read()]
            await stream.write(payload(fail=FAILURE, replies=0))
            received.append(await stream.read())
            return received, await stream.code()

    received, code = await trio.to_thread.run_sync(asyncio.run, talk())
    assert (b"hello" in received[0], FAILURE.encode() in received[1]) == (True, True)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


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
