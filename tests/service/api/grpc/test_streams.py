"""ModelStreamInfer as clients see it: replies and errors at once, back-pressure, and ends of every kind."""

from __future__ import annotations

import re
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

from tests.service.api.grpc.streams import Caller, Streaming, open_peer, payload, start_stream, streaming_server
from tests.support.grpc_clients import call, with_channel, with_triton
from tests.support.streaming_servables import FIRST_TIMESTAMP
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.bytes_client import message

FAILURE = "Mediapipe execution failed. MP status - INTERNAL: node"


@pytest.fixture
async def streaming(tmp_path: Path) -> AsyncIterator[Streaming]:
    """Serve as long as the test lasts."""
    async with streaming_server(tmp_path) as server:
        yield server


async def _called(streaming: Streaming, work: Callable[[Caller], Any]) -> Any:
    return await with_channel(streaming.address, lambda channel: work(Caller(channel)))


def _texts(messages: list[Any]) -> list[str]:
    return [each.error_message or bytes(each.infer_response.raw_output_contents[0]).decode() for each in messages]


async def test_replies_come_while_the_client_still_sends(streaming: Streaming) -> None:
    """Each reply is there before the next request is sent, and the stream ends well after a half-close."""

    def work(caller: Caller) -> Any:
        replies = []
        for text in (b"one", b"two", b"three"):
            caller.send(payload(data=text))
            replies.append(caller.next())
        caller.end()
        return replies, caller.finish()

    replies, (rest, status, _) = await _called(streaming, work)

    assert (_texts(replies), rest, status) == (["one", "two", "three"], [], "OK")


async def test_a_reply_has_what_user_code_says_of_it(streaming: Streaming) -> None:
    """Name, datatype and shape of an output are as given, and the timestamp has 64 bits."""

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


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_failure_reaches_a_client_that_is_silent(streaming: Streaming, earlier: int) -> None:
    """What was made before comes first, then the error's text on the stream, then the status with the same text."""

    def work(caller: Caller) -> Any:
        for _ in range(earlier):
            caller.send(payload(data=b"fine"))
        caller.send(payload(data=b"last", replies=2, fail=FAILURE))
        return caller.finish()

    messages, status, text = await _called(streaming, work)

    assert _texts(messages) == ["fine"] * earlier + ["last", "last", FAILURE]
    assert [bool(each.error_message) for each in messages][-2:] == [False, True]
    assert (status, text) == ("INVALID_ARGUMENT", FAILURE)


async def test_a_failure_after_the_half_close_is_told_by_the_status_alone(streaming: Streaming) -> None:
    """A client that has ended its requests gets no message besides the replies."""
    servable = streaming.servable

    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(data=b"x", fail=FAILURE, hold=True), end=True)
        await streaming.wait(servable.holding)
        servable.release()
        trailers = await peer.trailers(stream_id)

    assert (trailers["grpc-status"], trailers["grpc-message"]) == ("3", FAILURE)
    assert peer.body(stream_id).count(b"graph") == 1


async def test_a_stream_that_cannot_begin_has_only_a_status(streaming: Streaming) -> None:
    """Nothing is written for an error on opening."""

    def work(caller: Caller) -> Any:
        caller.send(payload(refuse="Failed to start mediapipe graph"))
        return caller.finish()

    assert await _called(streaming, work) == ([], "FAILED_PRECONDITION", "Failed to start mediapipe graph")


async def test_a_stream_to_what_is_not_there_is_refused(streaming: Streaming) -> None:
    """Unknown names get OVMS's words for it, as the status of the stream."""

    def work(caller: Caller) -> Any:
        caller.send(payload(model="nothing"))
        return caller.finish()

    text = "Mediapipe graph definition with requested name is not found"
    assert await _called(streaming, work) == ([], "NOT_FOUND", text)


async def test_a_problem_with_one_request_leaves_the_stream_open(streaming: Streaming) -> None:
    """The problem is a message on the stream, and later requests are answered."""

    def work(caller: Caller) -> Any:
        for request in (payload(data=b"a"), payload(problem="x is unexpected"), payload(data=b"b")):
            caller.send(request)
        caller.end()
        return caller.finish()

    messages, status, _ = await _called(streaming, work)

    assert (_texts(messages), status) == (["a", "x is unexpected", "b"], "OK")
    assert [each.HasField("infer_response") for each in messages] == [True, False, True]


async def test_a_malformed_message_ends_the_stream_with_its_status(streaming: Streaming) -> None:
    """Bytes that are no request are refused with INVALID_ARGUMENT, and what runs for the stream is stopped."""

    def work(caller: Caller) -> Any:
        caller.send(payload(data=b"a"))
        caller.next()
        caller.send(b"\x0a\xff")
        return caller.finish()

    messages, status, text = await _called(streaming, work)

    assert (messages, status) == ([], "INVALID_ARGUMENT")
    assert "malformed inference.ModelInferRequest" in text
    assert streaming.servable.open == 0
    assert re.search(r'ovmstrio_requests_total{.*code="INVALID_ARGUMENT".*} 1.0', streaming.metrics)


async def test_garbage_within_a_stream_is_its_clients_fault(streaming: Streaming) -> None:
    """It has one line at INFO, without a traceback, and the status as its code in the metrics."""

    def work(caller: Caller) -> Any:
        caller.send(payload(data=b"a"))
        caller.next()
        caller.send(b"\x0a\xff")
        return caller.finish()

    with capture_logs() as logs:
        for _ in range(3):
            await _called(streaming, work)
    (line,) = [each for each in logs if each["log_level"] != "debug"]
    assert (line["log_level"], line["event"], line["status"]) == ("info", "request cannot be read", "INVALID_ARGUMENT")
    assert "malformed inference.ModelInferRequest" in line["reason"]
    assert not any("exc_info" in each for each in logs)
    count = 'ovmstrio_requests_total{api="KServe",code="INVALID_ARGUMENT",interface="gRPC",'
    assert count in streaming.metrics


async def test_a_stream_that_ends_by_itself_ends_the_call(streaming: Streaming) -> None:
    """The call ends well although the client has not said that it is done."""

    def work(caller: Caller) -> Any:
        caller.send(payload(data=b"a"))
        caller.send(payload(end=True))
        return caller.finish()

    messages, status, _ = await _called(streaming, work)

    assert (_texts(messages), status) == (["a"], "OK")


async def test_many_replies_come_in_order(streaming: Streaming) -> None:
    """Replies that share writes are all there, in the order in which they were made."""

    def work(caller: Caller) -> Any:
        caller.send(payload(data=b"x" * 500, replies=3_000))
        caller.end()
        return caller.finish()

    messages, status, _ = await _called(streaming, work)

    stamps = [each.infer_response.parameters["OVMS_MP_TIMESTAMP"].int64_param for each in messages]
    assert status == "OK"
    assert stamps == list(range(FIRST_TIMESTAMP, FIRST_TIMESTAMP + 3_000))


async def test_the_deadline_of_the_call_ends_the_stream(streaming: Streaming) -> None:
    """The client's timeout stops a graph that still works, which has known of it."""

    def work(channel: Any) -> Any:
        caller = Caller(channel, timeout=2)
        caller.send(payload(hold=True))
        return caller.finish()

    _, status, _ = await with_channel(streaming.address, work)

    assert status == "DEADLINE_EXCEEDED"
    await streaming.wait(streaming.servable.cancelled)
    assert streaming.servable.streams[0].requests[0].deadline < float("inf")


# Clients that leave


@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_client_that_leaves_stops_a_graph_that_works(streaming: Streaming, *, half_closed: bool) -> None:
    """Cancelling is felt while nothing is sent in either direction, before and after the half-close."""
    servable = streaming.servable

    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(hold=True), end=half_closed)
        await streaming.wait(servable.holding)
        peer.h2.reset_stream(stream_id, 8)
        await peer.flush()
        await streaming.wait(servable.cancelled)

    await streaming.wait(servable.closed)
    assert servable.open == 0


async def test_a_client_that_leaves_while_it_does_not_read_stops_the_graph(streaming: Streaming) -> None:
    """Cancelling is felt while replies wait for the client's window."""
    servable = streaming.servable

    async with open_peer(streaming.address) as peer:
        stream_id = await start_stream(peer, payload(data=b"x" * 10_000, replies=10_000))
        while len(peer.body(stream_id)) < 65_535:
            assert await peer.read()
        assert servable.open == 1
        peer.h2.reset_stream(stream_id, 8)
        await peer.flush()
        await streaming.wait(servable.cancelled)


async def test_a_lost_connection_stops_the_graph(streaming: Streaming) -> None:
    """A client whose connection breaks has left its streams, even if a request still waits to be taken in."""
    servable = streaming.servable

    async with open_peer(streaming.address) as peer:
        await start_stream(peer, payload(hold=True), payload(), payload())
        await streaming.wait(servable.holding)

    await streaming.wait(servable.cancelled)


async def test_leases_are_given_back_whatever_happens(streaming: Streaming) -> None:
    """The servable can be retired after streams that ended, failed, were refused and were left."""

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


# Back-pressure


async def test_requests_are_not_read_ahead_of_the_graph(streaming: Streaming) -> None:
    """A graph that takes nothing lets the client's window run dry; all requests are answered once it goes on."""
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


async def test_a_slow_reader_holds_up_the_graph(streaming: Streaming) -> None:
    """While the client's window is full only a few replies wait, however many the graph could make."""
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
    """Read to the end of a call, opening windows as clients do."""
    credited = 0
    with trio.fail_after(WAIT_SECONDS):
        while not any(isinstance(e, h2.events.StreamEnded) and e.stream_id == stream_id for e in peer.events):
            come = len(peer.body(stream_id))
            if come > credited:
                peer.h2.acknowledge_received_data(come - credited, stream_id)
                credited = come
                await peer.flush()
            assert await peer.read()


# The server's end


async def test_streams_go_on_while_the_server_drains(streaming: Streaming) -> None:
    """Requests are answered until the grace ends; what is open then is told that the server goes."""
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


# Other clients, and what is counted


async def test_triton_gets_replies_problems_and_the_failure(streaming: Streaming) -> None:
    """The callback of tritonclient sees each reply, each problem and then the status of the failure."""
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


async def test_asyncio_clients_are_served(streaming: Streaming) -> None:
    """Grpcio's asyncio client writes and reads by turns and sees the failure while it is silent."""
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


async def test_requests_and_replies_of_a_stream_are_counted(streaming: Streaming) -> None:
    """Accepted, rejected and answered requests are counted one by one while the stream is open, errors at its end."""
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


async def test_a_unary_call_answers_with_the_raw_output(streaming: Streaming) -> None:
    """ModelInfer of a graph writes what user code says, as a stream does."""
    service = "/inference.GRPCInferenceService/ModelInfer"
    response = await call(streaming.address, service, payload(data=b"\x01"), "inference.ModelInferResponse")

    assert (response.outputs[0].datatype, list(response.raw_output_contents)) == ("words", [b"\x01"])
    labels = '{api="KServe",interface="gRPC",method="ModelInfer",name="graph"}'
    assert f"ovms_requests_accepted{labels} 1.0" in streaming.metrics
    assert f"ovms_responses{labels} 1.0" in streaming.metrics
