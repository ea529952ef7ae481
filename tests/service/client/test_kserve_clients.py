from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openvino as ov
import orjson
import pytest

from ovmstrio.client import Client, TensorInfo, Unreachable, open_client
from ovmstrio.client.api import TIMESTAMP, StreamOutput, StreamReply, StreamRequest, cancel_on_interrupt
from ovmstrio.core import errors
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.status_errors import status_of
from tests.support import ir
from tests.support.plain_http import QuietHandler, answering_http, relaying
from tests.support.ports import free_ports, refusing_port
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
MODELS: dict[str, ov.Model] = {
    "dummy": ir.dummy(),
    "sum": ir.sum_of_two(),
    "strings": ir.string_passthrough(),
    "half": ir.passthrough("FP16"),
    "brain": ir.passthrough("BF16"),
    "long": ir.passthrough("INT64"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    root: Path = tmp_path_factory.mktemp("models")
    entries = [
        {"config": {"name": name, "base_path": str(ir.save(model, root, name)), "plugin_config": EXACT}}
        for name, model in MODELS.items()
    ]
    config = root / "config.json"
    config.write_text(json.dumps({"model_config_list": entries}))
    with serving_in_thread(config_path=config) as running:
        yield running


@pytest.fixture(params=["gRPC", "REST"])
def client(server: ServedInThread, request: pytest.FixtureRequest) -> Iterator[Client]:
    rest = request.param == "REST"
    with open_client(server.rest if rest else server.grpc, rest=rest) as opened:
        yield opened


def test_outputs_are_arrays_by_name(client: Client) -> None:
    x, y = np.ones((1, 10), np.float32), np.full((1, 10), 2, np.float32)
    outputs = client.infer("sum", {"x": x, "y": y})
    np.testing.assert_array_equal(outputs["sum"], x + y)
    np.testing.assert_array_equal(outputs["difference"], x - y)


@pytest.mark.parametrize(
    ("model", "name", "array", "datatypes"),
    [
        ("half", "x", np.arange(6, dtype=np.float16).reshape(2, 3), {"x": "FP16"}),
        ("brain", "x", np.arange(6, dtype=np.float32).reshape(2, 3), {"x": "BF16"}),
        ("long", "x", np.array([[1, -2, 3], [4, 5, 2**31 - 1]], np.int64), {"x": "INT64"}),
        ("strings", "strings", np.array([b"", "héllo".encode(), b"a b"], object), {}),
    ],
)
def test_every_element_type_is_returned_unchanged(
    client: Client, model: str, name: str, array: Any, datatypes: dict[str, str]
) -> None:
    (output,) = client.infer(model, {name: array}, datatypes=datatypes).values()
    assert (output.tolist(), output.dtype) == (array.tolist(), array.dtype)


def test_metadata_states_and_health(client: Client) -> None:
    known = client.metadata("dummy")
    assert (known.name, known.versions, known.platform) == ("dummy", ("1",), "OpenVINO")
    assert known.inputs == (TensorInfo("b", "FP32", (1, 10)),)
    assert known.outputs == (TensorInfo("a", "FP32", (1, 10)),)
    assert {state.name for state in client.models() if state.state == "READY"} == set(MODELS)
    assert client.server_live()
    assert client.server_ready().ready
    assert client.model_ready("dummy").ready


@pytest.mark.parametrize(
    ("model", "version", "shape", "error", "text"),
    [
        ("unknown", "", (1, 10), errors.NotFound, "not found"),
        ("dummy", "7", (1, 10), errors.NotFound, "version is not found"),
        ("dummy", "", (1, 9), errors.InvalidRequest, "Expected: (1,10); Actual: (1,9)"),
    ],
)
def test_refusals_have_the_class_and_text_of_the_server(
    client: Client, model: str, version: str, shape: tuple[int, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        client.infer(model, {"b": np.zeros(shape, np.float32)}, version=version)
    assert text in str(raised.value)


@pytest.mark.parametrize("rest", [False, True])
def test_an_absent_server_is_unreachable_and_a_silent_one_a_deadline(server: ServedInThread, rest: bool) -> None:
    (port,) = free_ports(1)
    with open_client(f"127.0.0.1:{port}", rest=rest, timeout=5) as client, pytest.raises(Unreachable, match=str(port)):
        client.server_live()
    target = server.http if rest else server.grpc
    with relaying(target) as relay, open_client(relay.address, rest=rest, timeout=2) as client:
        assert client.server_live()
        relay.hold()
        with pytest.raises(errors.DeadlineExceeded, match="did not answer in time"):
            client.infer("dummy", {"b": np.zeros((1, 10), np.float32)})


Behaviour = Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]


@contextmanager
def _grpc_server(behaviour: Behaviour) -> Iterator[str]:
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


def _reply(name: str, raw: bytes, timestamp: int | None = None, datatype: str = "UINT8") -> Any:
    message = message_class("inference.ModelStreamInferResponse")()
    message.infer_response.outputs.add(name=name, datatype=datatype, shape=[len(raw)])
    message.infer_response.raw_output_contents.append(raw)
    if timestamp is not None:
        message.infer_response.parameters[TIMESTAMP].int64_param = timestamp
    return message


def _problem(text: str) -> Any:
    return message_class("inference.ModelStreamInferResponse")(error_message=text)


def test_requests_have_the_form_that_python_nodes_expect() -> None:
    seen: list[Any] = []

    def behaviour(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            seen.append(request)
            yield _reply("out", b"ok", request.parameters[TIMESTAMP].int64_param)

    array = np.array([[1.5, 2.5]], np.float32)
    given = [
        StreamRequest({"text": "héllo".encode(), "data": array}, 5, "mine", {"flag": True, "count": 3, "word": "x"}),
        StreamRequest({}, 9),
    ]
    with _grpc_server(behaviour) as url, open_client(url) as client:
        replies = list(client.stream("graph", given))
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


def test_requests_are_sent_while_replies_arrive() -> None:
    first_came = threading.Event()

    def behaviour(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield _reply("out", request.raw_input_contents[0])

    def requests() -> Iterator[StreamRequest]:
        yield StreamRequest({"in": b"one"})
        assert first_came.wait(WAIT_SECONDS)
        yield StreamRequest({"in": b"two"})

    found = []
    with _grpc_server(behaviour) as url, open_client(url) as client:
        for each in client.stream("graph", requests()):
            found.append(each.outputs[0].data)
            first_came.set()
    assert found == [b"one", b"two"]


def test_a_failed_request_is_a_reply_and_a_failed_stream_an_error() -> None:
    def behaviour(_: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield _problem("bad timestamp")
        yield _reply("out", b"x", 1)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Mediapipe execution failed. MP status - INTERNAL: why")

    with _grpc_server(behaviour) as url, open_client(url) as client:
        replies = client.stream("graph", [StreamRequest({})])
        assert next(replies).error == "bad timestamp"
        assert next(replies).timestamp == 1
        with pytest.raises(errors.GraphFailure, match="INTERNAL: why") as raised:
            next(replies)
    assert status_of(raised.value) == "gRPC status INVALID_ARGUMENT"


def test_closing_the_iterator_cancels_the_call() -> None:
    cancelled = threading.Event()

    def behaviour(_: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(cancelled.set)
        yield _reply("out", b"x")
        assert cancelled.wait(WAIT_SECONDS)

    with _grpc_server(behaviour) as url, open_client(url) as client:
        with closing(client.stream("graph", [StreamRequest({})])) as replies:
            next(replies)
            assert not cancelled.is_set()
        assert cancelled.wait(WAIT_SECONDS)


def _read_until_interrupted(replies: Iterator[StreamReply], count: int) -> None:
    main = threading.main_thread().ident
    interrupter = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT))
    try:
        for number, _ in enumerate(replies):
            if number == count:
                interrupter.start()
    finally:
        interrupter.join()


def test_an_interrupt_keeps_the_connection_usable() -> None:
    """Wherever in the library it comes, Ctrl-C is raised, and the connection serves the next stream."""

    def behaviour(requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        next(requests)
        while True:
            yield _reply("out", b"x")

    with _grpc_server(behaviour) as url, open_client(url) as client:
        for count in range(100):
            with closing(client.stream("graph", [StreamRequest({})])) as replies:
                next(replies)
                with pytest.raises(KeyboardInterrupt):
                    _read_until_interrupted(replies, count % 10)


def test_a_signal_handler_of_the_program_is_kept() -> None:
    came = []
    previous = signal.signal(signal.SIGINT, lambda *_: came.append("interrupt"))
    try:
        with cancel_on_interrupt(lambda: came.append("cancelled")):
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
def test_an_unserializable_request_is_refused(request_: StreamRequest, text: str) -> None:
    with (
        _grpc_server(lambda requests, _: (_problem("") for _ in requests)) as url,
        open_client(url) as client,
        pytest.raises(errors.InvalidRequest, match=text),
    ):
        list(client.stream("graph", [request_]))


def test_an_error_of_the_request_iterator_is_raised() -> None:
    def requests() -> Iterator[StreamRequest]:
        yield StreamRequest({})
        raise errors.InvalidRequest("line 2: not JSON")

    with (
        _grpc_server(lambda requests, _: (_reply("out", b"x") for _ in requests)) as url,
        open_client(url) as client,
        pytest.raises(errors.InvalidRequest, match="line 2"),
    ):
        list(client.stream("graph", requests()))


@contextmanager
def _rest_server(*pieces: bytes, status: int = 200, is_complete: bool = True) -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # noqa: N802 - the library's name
            asked.append((self.path, orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in pieces:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if is_complete:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

    with answering_http(Handler) as address:
        yield address, asked


def test_rest_sends_inputs_by_name_and_reads_events() -> None:
    events = (
        b'data: {"model_name":"g","parameters":{"OVMS_MP_TIMESTAMP":7},"out":"a"}\n\n',
        b'data: {"out":[1,2]}\n\n',
    )
    request = StreamRequest({"text": b"hi", "data": np.array([1, 2])}, 7, "mine", {"limit": 3})
    with _rest_server(*events) as (url, asked), open_client(url, rest=True) as client:
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


def test_rest_errors_before_and_within_a_stream() -> None:
    request = [StreamRequest({})]
    with (
        refusing_port() as port,
        open_client(f"127.0.0.1:{port}", rest=True) as client,
        pytest.raises(Unreachable, match="no server answers REST"),
    ):
        list(client.stream("graph", request))
    with _rest_server(b'{"error":"no such model"}', status=404) as (url, _), open_client(url, rest=True) as client:
        with pytest.raises(errors.NotFound, match="no such model") as raised:
            list(client.stream("graph", request))
        assert status_of(raised.value) == "HTTP status 404"
    with _rest_server(b'event: error\ndata: {"error":"why"}\n\n') as (url, _), open_client(url, rest=True) as client:
        assert [each.error for each in client.stream("graph", request)] == ["why"]


@pytest.mark.parametrize(
    ("pieces", "is_complete", "error", "message", "outputs"),
    [
        ((b'data: {"out":"a"}\n\n',), False, Unreachable, r"the stream from .* broke", ["a"]),
        ((b"data: {\n\n",), True, errors.ServerError, "does not answer as a KServe v2 server does", []),
        ((b"data: [1]\n\n",), True, errors.ServerError, "does not answer as a KServe v2 server does", []),
    ],
    ids=["truncated", "invalid JSON", "no object"],
)
def test_rest_raises_after_the_events_before_a_failure(
    pieces: tuple[bytes, ...], is_complete: bool, error: type[Exception], message: str, outputs: list[str]
) -> None:
    with _rest_server(*pieces, is_complete=is_complete) as (url, _), open_client(url, rest=True) as client:
        replies = client.stream("graph", [StreamRequest({})])
        assert [next(replies).outputs[0].data for _ in outputs] == outputs
        with pytest.raises(error, match=message):
            next(replies)
