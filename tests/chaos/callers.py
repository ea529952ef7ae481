"""Well-behaved clients: each repeats one request and checks the response."""

from __future__ import annotations

import http.client
import json
import select
import socket
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ovmstrio.encoding.messages import message_class
from tests.chaos.ledger import CallOutcome
from tests.fuzz.grpc_calls import INFER, infer_request
from tests.support.bare_http2 import BareConnection, ConnectionEnded, framed

SECONDS: Final = 60.0
_REFUSALS: Final = {
    408: CallOutcome.REFUSED,
    429: CallOutcome.REFUSED,
    503: CallOutcome.REFUSED,
    400: CallOutcome.MISSING,
    404: CallOutcome.MISSING,
}
"""A path that nothing has is refused with 400, as OVMS does."""
_STATUSES: Final = {"5": CallOutcome.MISSING, "8": CallOutcome.REFUSED, "14": CallOutcome.REFUSED}
_OPS_CLOSED: Final = '"err_no":3001'
Result = tuple[CallOutcome, str]


class HttpCaller:
    def __init__(self, name: str, port: int, make: Callable[[int], tuple[str, Any, Callable[[str], bool]]]) -> None:
        self.name = name
        self._make = make
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    def ask(self, number: int) -> Result:
        path, document, is_right = self._make(number)
        if self._connection.sock is not None and _has_ended(self._connection.sock):
            self._connection.close()
        try:
            self._connection.connect() if self._connection.sock is None else None
        except OSError as error:
            return CallOutcome.UNREACHED, repr(error)
        try:
            self._connection.request("POST", path, json.dumps(document), {"content-type": "application/json"})
            with self._connection.getresponse() as answer:
                text = answer.read().decode()
        except TimeoutError as error:
            self._connection.close()
            return CallOutcome.SILENT, repr(error)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            return CallOutcome.LOST, repr(error)
        if _OPS_CLOSED in text:
            return CallOutcome.REFUSED, text
        if answer.status != http.client.OK:
            return _REFUSALS.get(answer.status, CallOutcome.FAILED), f"{answer.status} {text}"
        return (CallOutcome.RIGHT, "") if is_right(text) else (CallOutcome.WRONG, text)

    def close(self) -> None:
        self._connection.close()


def _has_ended(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable)


class GrpcCaller:
    def __init__(self, name: str, port: int, make: Callable[[int], tuple[bytes, Callable[[Any], bool]]]) -> None:
        self.name, self.port = name, port
        self._make = make
        self._connection: BareConnection | None = None

    def ask(self, number: int) -> Result:
        message, is_right = self._make(number)
        try:
            connection = self._connected()
        except (OSError, ConnectionEnded) as error:
            self.close()
            return CallOutcome.UNREACHED, repr(error)
        stream, data = connection.begin(INFER, framed(message))
        try:
            connection.send(data)
            answer = connection.wait(stream)
        except (ConnectionEnded, OSError) as error:
            self.close()
            if isinstance(error, TimeoutError):
                return CallOutcome.SILENT, repr(error)
            return (CallOutcome.UNREACHED if _was_refused(connection, stream) else CallOutcome.LOST), repr(error)
        if answer.status != "0":
            if "equence" in answer.headers.get("grpc-message", ""):
                return CallOutcome.FORGOTTEN, str(answer.headers)
            outcome = _STATUSES.get(
                answer.status, CallOutcome.UNREACHED if answer.reset == _REFUSED_STREAM else CallOutcome.FAILED
            )
            return outcome, f"{answer.headers} {answer.reset}"
        given = message_class("inference.ModelInferResponse").FromString(answer.message)
        return (CallOutcome.RIGHT, "") if is_right(given) else (CallOutcome.WRONG, str(given))

    def _connected(self) -> BareConnection:
        held = self._connection
        try:
            while held is not None and _has_ended(held.socket):
                held.take(held.read())
        except (ConnectionEnded, OSError):
            self.close()
        if held is not None and held.goaway is not None:
            self.close()
        if self._connection is None:
            self._connection = BareConnection(self.port, timeout=SECONDS)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_REFUSED_STREAM: Final = 7


def _was_refused(connection: BareConnection, stream: int) -> bool:
    return connection.goaway is not None and int.from_bytes(connection.goaway.payload[:4]) < stream


class SequenceCaller(GrpcCaller):
    """Client whose sequence sums its inputs; it begins a new sequence when the state is unknown."""

    def __init__(self, name: str, port: int, sequence: int) -> None:
        super().__init__(name, port, self._make_step)
        self._id = sequence
        self._steps = 0

    def ask(self, number: int) -> Result:
        outcome, context = super().ask(number)
        if outcome is CallOutcome.RIGHT:
            self._steps += 1
        else:
            self._id, self._steps = self._id + 1000, 0
        return outcome, context

    def _make_step(self, _number: int) -> tuple[bytes, Callable[[Any], bool]]:
        request = infer_request("stateful", x=np.ones((1, 2), np.float32))
        request.parameters["sequence_id"].int64_param = self._id
        request.parameters["sequence_start"].bool_param = self._steps == 0
        wanted = np.full((1, 2), self._steps + 1, np.float32).tobytes()
        return request.SerializeToString(), lambda given: wanted in given.raw_output_contents


def _row(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full((1, 10), number % 1000, np.float32)


def _infer_row(model: str) -> Callable[[int], tuple[bytes, Callable[[Any], bool]]]:
    def make(number: int) -> tuple[bytes, Callable[[Any], bool]]:
        wanted = [(_row(number) + 1).tobytes()]
        request: bytes = infer_request(model, b=_row(number)).SerializeToString()
        return request, lambda given: list(given.raw_output_contents) == wanted

    return make


def _post_row(number: int) -> tuple[str, Any, Callable[[str], bool]]:
    tensor = {"name": "b", "shape": [1, 10], "datatype": "FP32", "data": _row(number).ravel().tolist()}
    wanted = (_row(number) + 1).ravel().tolist()
    return "/v2/models/model/infer", {"inputs": [tensor]}, lambda text: json.loads(text)["outputs"][0]["data"] == wanted


def _predict_row(number: int) -> tuple[str, Any, Callable[[str], bool]]:
    wanted = (_row(number) + 1).tolist()
    document = {"instances": _row(number).tolist()}
    return "/v1/models/dag:predict", document, lambda text: json.loads(text)["predictions"] == wanted


def _infer_text(graph: str) -> Callable[[int], tuple[bytes, Callable[[Any], bool]]]:
    def make(number: int) -> tuple[bytes, Callable[[Any], bool]]:
        text = f"text {number}".encode()
        request = message_class("inference.ModelInferRequest")(model_name=graph)
        request.inputs.add(name="in", datatype="BYTES", shape=[len(text)])
        request.raw_input_contents.append(text)
        return request.SerializeToString(), lambda given: list(given.raw_output_contents) == [text.upper()]

    return make


def _generate(number: int) -> tuple[str, Any, Callable[[str], bool]]:
    wanted = f"TEXT {number}"
    return "/v2/models/graph/generate_stream", {"in": f"text {number}"}, lambda text: wanted in text


def _handle(path: str) -> Callable[[int], tuple[str, Any, Callable[[str], bool]]]:
    def make(number: int) -> tuple[str, Any, Callable[[str], bool]]:
        return path, [number, 1, 2], lambda text: json.loads(text) == number + 3

    return make


def _ask_ops(number: int) -> tuple[str, Any, Callable[[str], bool]]:
    wanted = [f"first {number}"]
    document = {"key": ["x"], "value": [str(number)]}
    return "/ops/prediction", document, lambda text: json.loads(text).get("value") == wanted


Caller = HttpCaller | GrpcCaller


def callers_of_everything(grpc: int, rest: int, suffix: str = "") -> list[Caller]:
    return [
        GrpcCaller(f"model, gRPC{suffix}", grpc, _infer_row("model")),
        GrpcCaller(f"pipeline, gRPC{suffix}", grpc, _infer_row("dag")),
        GrpcCaller(f"graph, gRPC{suffix}", grpc, _infer_text("graph")),
        SequenceCaller(f"sequence, gRPC{suffix}", grpc, 1 if not suffix else 2),
        HttpCaller(f"model, REST{suffix}", rest, _post_row),
        HttpCaller(f"pipeline, TensorFlow's REST{suffix}", rest, _predict_row),
        HttpCaller(f"graph, events{suffix}", rest, _generate),
        HttpCaller(f"handler, HTTP{suffix}", rest, _handle("/handler")),
        HttpCaller(f"Ops, HTTP{suffix}", rest, _ask_ops),
    ]


def callers_of_project(rest: int, suffix: str = "") -> list[Caller]:
    return [HttpCaller(f"project, HTTP {number}{suffix}", rest, _handle("/")) for number in range(3)]
