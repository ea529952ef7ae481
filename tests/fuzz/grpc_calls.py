"""Calls of every gRPC service of the server, invalid HTTP/2, and the connections that send them."""

from __future__ import annotations

import contextlib
import gzip
import socket
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Any, Final

import numpy as np
from hpack import Encoder

from ovmstrio.encoding.messages import FILES, message_class
from ovmstrio.encoding.messages import METHOD as PADDLE
from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import PREFACE, ErrorCode
from tests.fuzz.messages import Message, Outcome, Transport
from tests.fuzz.mutations import NUMBERS, changed_bytes, changed_serialised, text
from tests.support.bare_http2 import Answer, BareConnection, ConnectionEnded, call_headers, frame, framed

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
STREAM: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
PREDICT: Final = "/tensorflow.serving.PredictionService/Predict"
RELOAD: Final = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
WATCH: Final = "/grpc.health.v1.Health/Watch"
_HOT: Final = (INFER, INFER, STREAM, PREDICT, PADDLE)
_ROW: Final = np.arange(10, dtype=np.float32).reshape(1, 10)
_STREAMS: Final = (STREAM, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
_VALUES: Final = (
    ("name", "model"),
    ("list_services", ""),
    ("file_containing_symbol", "inference.ModelInferRequest"),
    ("service", "inference.GRPCInferenceService"),
    ("model_spec", {"name": "model"}),
)
_METADATA: Final = (
    ("grpc-timeout", ("1n", "0S", "1S", "99999999H", "123456789S", "-1S", "S", "1.5S", "")),
    ("grpc-encoding", ("gzip", "identity", "deflate", "br", "")),
    ("grpc-accept-encoding", ("gzip", "identity,gzip", "x" * 200)),
    ("content-type", ("application/grpc+proto", "application/grpc+json", "text/plain", "")),
    ("te", ("gzip", "")),
    ("x-bin", ("AAA", "!!!", "QUFB")),
    ("content-length", ("0", "5", "-1", "x", "99999999999")),
    ("x-long", ("y" * 9000,)),
    ("user-agent", ("\t", "é")),
)


def infer_request(model: str, **arrays: Any) -> Any:
    request = message_class("inference.ModelInferRequest")(model_name=model)
    names = {"float32": "FP32", "uint64": "UINT64", "uint32": "UINT32"}
    for name, given in arrays.items():
        if isinstance(given, bytes):
            request.inputs.add(name=name, datatype="BYTES", shape=[1])
            request.raw_input_contents.append(len(given).to_bytes(4, "little") + given)
        else:
            request.inputs.add(name=name, datatype=names[given.dtype.name], shape=given.shape)
            request.raw_input_contents.append(given.tobytes())
    return request


def _typed_request() -> Any:
    request = message_class("inference.ModelInferRequest")(model_name="model", id="7")
    tensor = request.inputs.add(name="b", datatype="FP32", shape=[1, 10])
    tensor.contents.fp32_contents.extend(range(10))
    request.outputs.add(name="a")
    request.parameters["binary_data"].bool_param = True
    return request


def _step() -> Any:
    request = infer_request("stateful", x=np.ones((1, 2), np.float32))
    request.parameters["sequence_id"].int64_param = 5
    request.parameters["sequence_start"].bool_param = True
    return request


def _predict(model: str, **arrays: Any) -> Any:
    request = message_class("tensorflow.serving.PredictRequest")()
    request.model_spec.name = model
    request.output_filter.append("a")
    for name, array in arrays.items():
        tensor = request.inputs[name]
        tensor.dtype = 1
        for size in array.shape:
            tensor.tensor_shape.dim.add(size=size)
        tensor.tensor_content = array.tobytes()
    return request


def _named(method: str, **fields: Any) -> Any:
    return _requests_of_methods()[method](**fields)


@cache
def _requests_of_methods() -> dict[str, Any]:
    return {
        f"/{file.package}.{service.name}/{method.name}": message_class(method.input_type.lstrip("."))
        for file in FILES.values()
        for service in file.service
        for method in service.method
    }


@cache
def _valid() -> dict[str, list[Any]]:
    requests: dict[str, list[Any]] = {method: [request()] for method, request in _requests_of_methods().items()}
    requests[INFER] = [
        *(infer_request(name, b=_ROW) for name in ("model", "dag", "dynamic")),
        *(infer_request("graph", **{"in": b"abc"}), infer_request("strings", strings=b"abc")),
        *(infer_request("ops", x=b"abc"), _typed_request(), _step()),
    ]
    requests[STREAM] = requests[INFER]
    requests[PREDICT] = [_predict(name, b=_ROW) for name in ("model", "dag", "dynamic")]
    requests[PADDLE] = [_named(PADDLE, key=["x"], value=["abc"], name="ops")]
    for method, given in requests.items():
        fields = {field.name for field in given[0].DESCRIPTOR.fields}
        if method not in {INFER, STREAM, PREDICT, PADDLE}:
            given += [_named(method, **{name: value}) for name, value in _VALUES if name in fields]
        if "metadata_field" in fields:
            given.append(_named(method, metadata_field=["signature_def"], model_spec={"name": "model"}))
    return requests


def grpc_message(random: Random, number: int) -> Message:
    methods = [method for method in _valid() if method != RELOAD]
    method = random.choice(_HOT if random.random() < 0.75 else methods)
    parts = random.choice((1, 1, 2, 5)) if method in _STREAMS else 1
    body = b"".join(_part(random, method) for _ in range(parts))
    headers = _metadata(random) if random.random() < 0.15 else ()
    path = changed_bytes(random, method.encode()).decode("latin-1") if random.random() < 0.01 else method
    if random.random() < 0.02:
        body = changed_bytes(random, body)
    return Message(number, f"grpc {method.rpartition('.')[2]}", Transport.GRPC, body, path, headers)


def _part(random: Random, method: str) -> bytes:
    data = changed_serialised(random, random.choice(_valid()[method]))
    match random.randrange(60):
        case 0:
            return framed(gzip.compress(data, mtime=0), compressed=True)
        case 1:
            return framed(data, compressed=True)
        case 2:
            return bytes([random.randrange(256)]) + (random.choice(NUMBERS) % 2**32).to_bytes(4, "big") + data
    return framed(data)


def _metadata(random: Random) -> tuple[tuple[str, str], ...]:
    chosen = random.sample(_METADATA, random.randint(1, 2))
    return tuple((name, random.choice(values)) for name, values in chosen)


def raw_http2_message(random: Random, number: int) -> Message:
    encoder = Encoder()
    parts = [PREFACE, frames.settings({}), *_frames(random, encoder)]
    data = b"".join(parts)
    if random.random() < 0.7:
        start = random.choice((0, len(PREFACE), len(PREFACE) + 9))
        data = data[:start] + changed_bytes(random, data[start:])
    return Message(number, "raw http2", Transport.RAW_HTTP2, data)


def _frames(random: Random, encoder: Encoder) -> Iterator[bytes]:
    for stream in range(1, 2 * random.choice((1, 1, 2, 5)), 2):
        if random.random() < 0.4:
            yield frame(
                random.randrange(12), random.randrange(256), random.choice((0, 1, stream, 2, 2**31 - 1)),
                random.randbytes(random.choice((0, 4, 5, 6, 8, 40))),
            )  # fmt: skip
        further = [(text(random), text(random))] if random.random() < 0.3 else []
        block = encoder.encode(call_headers(INFER, further))
        yield frames.header_frames(stream, block, random.choice((10, 16_384)), end_stream=False)
        body = framed(changed_serialised(random, random.choice(_valid()[INFER])))
        yield BareConnection.data(stream, body, end=random.random() < 0.9)


SECONDS: Final = 20.0


class GrpcLane:
    """A connection that is replaced when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: BareConnection | None = None
        self._streams: list[int] = []
        self._is_over = False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def begin(self, messages: Sequence[Message]) -> None:
        if self._connection is None:
            self._connection = BareConnection(self._port, timeout=SECONDS)
            self._is_over = False
        begun = [self._connection.begin(message.path, message.body, message.headers) for message in messages]
        self._streams = [stream for stream, _ in begun]
        with contextlib.suppress(ConnectionEnded):
            self._connection.send(b"".join(data for _, data in begun))

    def end(self, messages: Sequence[Message]) -> list[Outcome]:
        outcomes = [self._outcome(*each) for each in zip(messages, self._streams, strict=True)]
        if None in outcomes and len(messages) == 1:
            outcomes = [self._ended()]
        final = []
        for message, outcome in zip(messages, outcomes, strict=True):
            if outcome is None:
                self.close()
                self.begin([message])
                (outcome,) = self.end([message])  # noqa: PLW2901 - a repeated request has another outcome
            final.append(outcome)
        return final

    def _ended(self) -> Outcome:
        outcome = Outcome()
        connection = self._connection
        if connection is not None and connection.goaway is not None:
            outcome.add_reset("connection ended", int.from_bytes(connection.goaway.payload[4:8]))
        else:
            outcome.add_silence("no answer over gRPC")
        self.close()
        return outcome

    def _outcome(self, message: Message, stream: int) -> Outcome | None:
        connection = self._connection
        if connection is None or self._is_over:
            return None
        answer = connection.answers[stream]
        try:
            while not answer.ended:
                if message.path == WATCH and answer.data:
                    # It would last as long as its client.
                    connection.send(frames.rst_stream(stream, ErrorCode.CANCEL))
                    answer.headers.setdefault("grpc-status", "0")
                    break
                connection.take(connection.read())
        except (ConnectionEnded, TimeoutError):
            self._is_over = True
            return None
        del connection.answers[stream]
        outcome = Outcome()
        _note(outcome, answer)
        return outcome


def _note(outcome: Outcome, answer: Answer) -> None:
    if answer.reset is not None:
        outcome.add_reset("reset", answer.reset)
    elif answer.headers.get(":status", "200") != "200":
        outcome.add_http(int(answer.headers[":status"]), bytes(answer.data))
    else:
        outcome.add_grpc(answer.status, answer.headers.get("grpc-message", ""))


def exchange_raw_http2(port: int, data: bytes) -> Outcome:
    """Send bytes on a separate connection, and read until the server has closed it."""
    outcome = Outcome()
    connection = BareConnection(port, timeout=SECONDS, greets=False)
    connection.answers = _Answers()
    with connection:
        with contextlib.suppress(ConnectionEnded, OSError):
            connection.send(data)
            connection.socket.shutdown(socket.SHUT_WR)
        try:
            while True:
                connection.take(connection.read())
        except TimeoutError:
            outcome.add_silence("a connection stays open over HTTP/2")
        except (ConnectionEnded, OSError):
            outcome.kinds.append("closed")
    for answer in connection.answers.values():
        if answer.ended:
            _note(outcome, answer)
    if connection.goaway is not None:
        outcome.add_reset("connection ended", int.from_bytes(connection.goaway.payload[4:8]))
    return outcome


class _Answers(dict[int, Answer]):
    def get(self, key: int, default: Answer | None = None) -> Answer:  # type: ignore[override]
        del default
        return self.setdefault(key, Answer())
