"""Streams of both clients, against small servers on real wires that do just what a test asks for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import grpc
import numpy as np
import orjson
import pytest

from ovmstrio.client import Unreachable, open_client
from ovmstrio.client.interrupts import interrupts_cancel
from ovmstrio.client.streaming import TIMESTAMP, StreamOutput, StreamReply, StreamRequest
from ovmstrio.core import errors
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.status_errors import status_of
from tests.support.plain_http import QuietHandler, answering_http
from tests.support.ports import refusing_port
from tests.support.waits import WAIT_SECONDS

Behaviour = Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]
"""What answers ``ModelStreamInfer``: requests in, messages out."""


@contextmanager
def grpc_server(behaviour: Behaviour) -> Iterator[str]:
    """Serve, and give the address."""
    method = grpc.stream_stream_rpc_method_handler(
        behaviour,
        request_deserializer=message_class("inference.ModelInferRequest").FromString,
        response_serializer=message_class("inference.ModelStreamInferResponse").SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": method})
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(WAIT_SECONDS)


def reply(name: str, raw: bytes, timestamp: int | None = None, datatype: str = "UINT8") -> Any:
    """Make a message of the server with one output."""
    message = message_class("inference.ModelStreamInferResponse")()
    message.infer_response.outputs.add(name=name, datatype=datatype, shape=[len(raw)])
    message.infer_response.raw_output_contents.append(raw)
    if timestamp is not None:
        message.infer_response.parameters[TIMESTAMP].int64_param = timestamp
    return message


def problem(text: str) -> Any:
    """Make a message of the server about a request."""
    return message_class("inference.ModelStreamInferResponse")(error_message=text)


def test_requests_arrive_as_python_nodes_expect_them() -> None:
    """Bytes have no length before them, arrays their type, and parameters the kind of their value."""
    seen: list[Any] = []

    def behaviour(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            seen.append(request)
            yield reply("out", b"ok", request.parameters[TIMESTAMP].int64_param)

    array = np.array([[1.5, 2.5]], np.float32)
    asked = [
        StreamRequest({"text": "héllo".encode(), "data": array}, 5, "mine", {"flag": True, "count": 3, "word": "x"}),
        StreamRequest({}, 9),
    ]
    with grpc_server(behaviour) as url, open_client(url) as client:
        replies = list(client.stream("graph", asked))
    assert replies == [StreamReply((StreamOutput("out", "UINT8", (2,), b"ok"),), stamp) for stamp in (5, 9)]
    first, second = seen
    assert (first.model_name, first.id, len(second.inputs)) == ("graph", "mine", 0)
    assert [(each.name, each.datatype, list(each.shape)) for each in first.inputs] == [
        ("text", "BYTES", [6]),
        ("data", "FP32", [1, 2]),
    ]
    assert list(first.raw_input_contents) == ["héllo".encode(), array.tobytes()]
    kinds = {name: value.WhichOneof("parameter_choice") for name, value in first.parameters.items()}
    assert kinds == {"flag": "bool_param", "count": "int64_param", "word": "string_param", TIMESTAMP: "int64_param"}


def test_requests_are_taken_while_replies_come() -> None:
    """The second request may be made of the first reply."""
    first_came = threading.Event()

    def behaviour(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield reply("out", request.raw_input_contents[0])

    def asked() -> Iterator[StreamRequest]:
        yield StreamRequest({"in": b"one"})
        assert first_came.wait(WAIT_SECONDS)
        yield StreamRequest({"in": b"two"})

    found = []
    with grpc_server(behaviour) as url, open_client(url) as client:
        for each in client.stream("graph", asked()):
            found.append(each.outputs[0].data)
            first_came.set()
    assert found == [b"one", b"two"]


def test_a_problem_with_a_request_is_a_reply_and_a_failed_stream_an_error() -> None:
    """What came before the failure is given, and the failure has class, text and status of the server's."""

    def behaviour(_: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield problem("bad timestamp")
        yield reply("out", b"x", 1)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Mediapipe execution failed. MP status - INTERNAL: why")

    with grpc_server(behaviour) as url, open_client(url) as client:
        replies = client.stream("graph", [StreamRequest({})])
        assert next(replies).error == "bad timestamp"
        assert next(replies).timestamp == 1
        with pytest.raises(errors.GraphFailure, match="INTERNAL: why") as raised:
            next(replies)
    assert status_of(raised.value) == "gRPC status INVALID_ARGUMENT"


def test_closing_the_iterator_cancels_on_the_server() -> None:
    """The server learns of it at once, not with its next message."""
    cancelled = threading.Event()

    def behaviour(_: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(cancelled.set)
        yield reply("out", b"x")
        assert cancelled.wait(WAIT_SECONDS)

    with grpc_server(behaviour) as url, open_client(url) as client:
        with closing(client.stream("graph", [StreamRequest({})])) as replies:
            next(replies)
            assert not cancelled.is_set()
        assert cancelled.wait(WAIT_SECONDS)


def test_an_interrupt_cancels_and_leaves_nothing_locked() -> None:
    """Wherever in the library it comes, Ctrl-C is raised, and the connection serves the next stream."""

    def behaviour(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        next(requests)
        while True:
            yield reply("out", b"x")

    with grpc_server(behaviour) as url, open_client(url) as client:
        for count in range(100):
            with closing(client.stream("graph", [StreamRequest({})])) as replies:
                next(replies)
                interrupter = threading.Thread(
                    target=signal.pthread_kill, args=(threading.main_thread().ident, signal.SIGINT)
                )
                with pytest.raises(KeyboardInterrupt):
                    _read_until_interrupted(replies, interrupter, count)


def _read_until_interrupted(replies: Iterator[StreamReply], interrupter: threading.Thread, count: int) -> None:
    try:
        for number, _ in enumerate(replies):
            if number == count % 10:
                interrupter.start()
    finally:
        interrupter.join()


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    """Who handles Ctrl-C goes on doing so while a stream waits."""
    came = []
    previous = signal.signal(signal.SIGINT, lambda *_: came.append("interrupt"))
    try:
        with interrupts_cancel(lambda: came.append("cancelled")):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert came == ["interrupt"]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (StreamRequest({}, 2**63), "cannot be written as a message"),
        (StreamRequest({}, parameters={"x": 1.5}), "cannot be written as a message"),  # type: ignore[dict-item]
        (StreamRequest({"x": np.zeros(1, np.complex128)}), "complex128"),
    ],
)
def test_a_request_that_the_wire_cannot_carry_is_told(request_: StreamRequest, text: str) -> None:
    """The library calls it an unknown error while it iterates; the caller learns which."""
    with (
        grpc_server(lambda requests, _: (problem("") for _ in requests)) as url,
        open_client(url) as client,
        pytest.raises(errors.InvalidRequest, match=text),
    ):
        list(client.stream("graph", [request_]))


def test_what_the_callers_requests_raise_is_raised() -> None:
    """An iterator of requests may fail half way."""

    def asked() -> Iterator[StreamRequest]:
        yield StreamRequest({})
        raise errors.InvalidRequest("line 2: not JSON")

    with (
        grpc_server(lambda requests, _: (reply("out", b"x") for _ in requests)) as url,
        open_client(url) as client,
        pytest.raises(errors.InvalidRequest, match="line 2"),
    ):
        list(client.stream("graph", asked()))


@contextmanager
def rest_server(*pieces: bytes, status: int = 200, whole: bool = True) -> Iterator[tuple[str, list[Any]]]:
    """Answer every POST with pieces of a body; ``whole`` ends it as HTTP wants.  Gives URL and what was asked."""
    asked: list[Any] = []

    class Handler(QuietHandler):
        """One connection."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # noqa: N802 - the library's name
            """Answer in chunks."""
            asked.append((self.path, orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in pieces:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if whole:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

    with answering_http(Handler) as address:
        yield address, asked


def test_rest_sends_inputs_by_name_and_reads_events() -> None:
    """One request with its parameters; an event for each reply."""
    events = (
        b'data: {"model_name":"g","parameters":{"OVMS_MP_TIMESTAMP":7},"out":"a"}\n\n',
        b'data: {"out":[1,2]}\n\n',
    )
    request = StreamRequest({"text": b"hi", "data": np.array([1, 2])}, 7, "mine", {"limit": 3})
    with rest_server(*events) as (url, asked), open_client(url, rest=True) as client:
        replies = list(client.stream("a/b", [request]))
    assert asked == [
        (
            "/v2/models/a%2Fb/generate_stream",
            {"text": "hi", "data": [1, 2], "parameters": {"limit": 3, TIMESTAMP: 7}, "id": "mine"},
        )
    ]
    assert replies == [
        StreamReply((StreamOutput("out", "JSON", (), "a"),), 7),
        StreamReply((StreamOutput("out", "JSON", (2,), [1, 2]),)),
    ]


def test_rest_tells_errors_before_and_within_a_stream() -> None:
    """A refusal is raised with its status; an error event is a reply."""
    with rest_server(b'{"error":"no such model"}', status=404) as (url, _), open_client(url, rest=True) as client:
        with pytest.raises(errors.NotFound, match="no such model") as raised:
            list(client.stream("graph", [StreamRequest({})]))
        assert status_of(raised.value) == "HTTP status 404"
    with rest_server(b'event: error\ndata: {"error":"why"}\n\n') as (url, _), open_client(url, rest=True) as client:
        assert [each.error for each in client.stream("graph", [StreamRequest({})])] == ["why"]


def test_rest_tells_a_broken_stream_from_an_absent_server() -> None:
    """What came before the break is given."""
    with (
        refusing_port() as port,
        open_client(f"127.0.0.1:{port}", rest=True) as client,
        pytest.raises(Unreachable, match="no server answers REST"),
    ):
        list(client.stream("graph", [StreamRequest({})]))
    with rest_server(b'data: {"out":"a"}\n\n', whole=False) as (url, _), open_client(url, rest=True) as client:
        replies = client.stream("graph", [StreamRequest({})])
        assert next(replies).outputs[0].data == "a"
        with pytest.raises(Unreachable, match=r"the stream from .* broke"):
            next(replies)


@pytest.mark.parametrize("body", [b"data: {\n\n", b"data: [1]\n\n"])
def test_rest_tells_an_answer_of_another_kind(body: bytes) -> None:
    """Events that hold no JSON object are no traceback."""
    with (
        rest_server(body) as (url, _),
        open_client(url, rest=True) as client,
        pytest.raises(errors.ServerError, match="does not answer as a KServe v2 server does"),
    ):
        list(client.stream("graph", [StreamRequest({})]))
