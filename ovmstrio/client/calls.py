"""Calls of the clients as bytes: KServe v2 over gRPC and REST, OpenAI chat, and their answers as values.

Both classes have the same methods. A method returns a ``ClientCall``: what is sent, and how the answer is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import quote, unquote, urlencode

import numpy as np
import orjson
from grpclib.const import Status

from ovmstrio.client.api import (
    TIMESTAMP,
    Health,
    InferResult,
    ModelInfo,
    ModelState,
    Posted,
    SequenceState,
    ServerInfo,
    StreamOutput,
    StreamReply,
    StreamRequest,
    TensorInfo,
    Value,
    to_array,
    to_raw_tensor,
)
from ovmstrio.client.chat import ChatAnswer, ChatDelta, read_answer, read_delta, text_of_error
from ovmstrio.client.links import Answer, GrpcLink, HttpLink
from ovmstrio.core.errors import InvalidRequest, NotSupported, ServerError
from ovmstrio.core.request import Buffer
from ovmstrio.core.tensor import BY_NAME, BYTES, RawTensor
from ovmstrio.encoding.raw_contents import bytes_array, from_raw
from ovmstrio.encoding.status_errors import error_of_grpc, error_of_http
from ovmstrio.transport.grpc.headers import encode_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ovmstrio.client.addresses import ServerAddress
    from ovmstrio.client.api import Parameter
    from ovmstrio.core.tensor import Array

T = TypeVar("T")


@dataclass(slots=True)
class ClientCall(Generic[T]):
    """One call.

    Attributes:
        head: header block (gRPC) or request line and headers (REST).
        body: pieces of the message; None if messages follow.
        read: reads the answer, whose status is a success unless ``reads_failures``.
    """

    head: bytes
    body: Sequence[Buffer] | None
    read: Callable[[Answer], T]
    reads_failures: bool = False


def _tensors(inputs: Mapping[str, Value], datatypes: Mapping[str, str] | None) -> list[RawTensor]:
    return [to_raw_tensor(name, value, (datatypes or {}).get(name)) for name, value in inputs.items()]


def _json(document: Mapping[str, Any]) -> bytes:
    """Encode a body; raises ``InvalidRequest`` if JSON cannot represent it."""
    try:
        return orjson.dumps(document)
    except TypeError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


# -- gRPC --------------------------------------------------------------------------------------------------------------

_SERVICE: Final = "inference.GRPCInferenceService"
_RAW_INPUT_TAG: Final = b"\x3a"
_RAW_OUTPUT_TAG: Final = 0x32
_FIELDS: Final[dict[type, str]] = {bool: "bool_param", int: "int64_param", str: "string_param"}
_SMALL_BYTES: Final = 16 * 1024
"""Size up to which protobuf's parser copies the tensors of a response."""
_HTTP_STATUSES: Final = {"401": "UNAUTHENTICATED", "403": "PERMISSION_DENIED", "429": "UNAVAILABLE"} | dict.fromkeys(
    ("502", "503", "504"), "UNAVAILABLE"
)
"""gRPC statuses of answers without one (https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md)."""
_STATUS_NAMES: Final = {status.value: status.name for status in Status}


class GrpcCalls:
    """Calls of ``inference.GRPCInferenceService``."""

    name: Final = "gRPC"
    new_link: Final = GrpcLink

    def __init__(self, address: ServerAddress, headers: Mapping[str, str]) -> None:
        # Protobuf takes a third of the time of ``import ovmstrio.client``.
        from ovmstrio.encoding import messages  # noqa: PLC0415 - imports one protocol's library only

        self._messages = messages
        self._address = address.text
        scheme = b"http" if address.context is None else b"https"
        first = ((b":method", b"POST"), (b":scheme", scheme), (b":authority", address.authority.encode()))
        last = [(b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"user-agent", b"ovmstrio")]
        last += [(name.encode(), value.encode()) for name, value in headers.items()]
        self._first = b"".join(encode_header(name, value) for name, value in first)
        self._last = b"".join(encode_header(name, value) for name, value in last)
        self._heads: dict[str, bytes] = {}
        self._request_type = messages.message_class("inference.ModelInferRequest")
        self._response_type = messages.message_class("inference.ModelInferResponse")

    def _head(self, method: str) -> bytes:
        head = self._heads.get(method)
        if head is None:
            path = encode_header(b":path", f"/{_SERVICE}/{method}".encode())
            head = self._heads[method] = self._first + path + self._last
        return head

    def error(self, answer: Answer) -> ServerError | None:
        """Return the error of an answer; None for a success."""
        if answer.status == 0:
            return None
        if answer.status < 0:
            status = answer.headers.get(":status", "")
            text = f"{self._address} is not a gRPC server (HTTP status {status or 'unknown'})"
            return error_of_grpc(_HTTP_STATUSES.get(status, "UNKNOWN"), text)
        text = unquote(answer.headers.get("grpc-message", ""))
        return error_of_grpc(_STATUS_NAMES.get(answer.status, "UNKNOWN"), text, answer.headers)

    def infer(  # noqa: PLR0917 - the fields of a request
        self,
        model: str,
        inputs: Mapping[str, Value],
        version: str,
        datatypes: Mapping[str, str] | None,
        parameters: Mapping[str, Parameter] | None,
        outputs: Sequence[str],
        request_id: str,
    ) -> ClientCall[InferResult]:
        """Return a ``ModelInfer`` call."""
        tensors = _tensors(inputs, datatypes)
        return ClientCall(
            self._head("ModelInfer"),
            self._infer_request(model, version, tensors, parameters, outputs, request_id),
            self._read_infer,
        )

    def _infer_request(  # noqa: PLR0917 - the fields of a request
        self,
        model: str,
        version: str,
        tensors: Sequence[RawTensor],
        parameters: Mapping[str, Parameter] | None,
        outputs: Sequence[str],
        request_id: str,
    ) -> list[Buffer]:
        from ovmstrio.encoding.protobuf_wire import delimited  # noqa: PLC0415 - see ``__init__``

        try:
            message = self._request_type(model_name=model, model_version=version, id=request_id)
            for tensor in tensors:
                message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            for output in outputs:
                message.outputs.add(name=output)
            for name, value in (parameters or {}).items():
                setattr(message.parameters[name], _FIELDS[type(value)], value)
            pieces: list[Buffer] = [message.SerializeToString()]
        except (ValueError, TypeError, LookupError) as error:
            raise InvalidRequest(f"a request cannot be written as a message: {error}") from None
        for tensor in tensors:
            pieces += delimited(_RAW_INPUT_TAG, tensor.data)
        return pieces

    def _read_infer(self, answer: Answer) -> InferResult:
        return self._result(answer.body)

    def _result(self, body: Buffer) -> InferResult:
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - see ``__init__``

        from ovmstrio.encoding.protobuf_wire import split_raw_contents  # noqa: PLC0415 - see ``__init__``

        raws: Sequence[Buffer | None]
        try:
            if len(body) <= _SMALL_BYTES:
                message = self._response_type.FromString(bytes(body))
                raws = message.raw_output_contents
            else:
                head, raws = split_raw_contents(body, _RAW_OUTPUT_TAG, "inference.ModelInferResponse")
                message = self._response_type.FromString(head)
        except (DecodeError, IndexError) as error:
            raise ValueError(f"no ModelInferResponse: {error}") from None
        found = InferResult()
        for place, output in enumerate(message.outputs):
            shape = tuple(output.shape)
            if raws:
                found[output.name] = from_raw(raws[place] or b"", output.datatype, shape)
            else:
                values = getattr(output.contents, BY_NAME[output.datatype].contents_field)
                found[output.name] = _array(list(values), output.datatype, shape)
        found.model, found.version, found.id = message.model_name, message.model_version, message.id
        if message.parameters:
            found.parameters = {
                name: getattr(value, choice)
                for name, value in message.parameters.items()
                if (choice := value.WhichOneof("parameter_choice")) is not None
            }
        return found

    def stream(self, model: str) -> ClientCall[None]:
        """Return a ``ModelStreamInfer`` call, whose messages follow."""
        del model
        return ClientCall(self._head("ModelStreamInfer"), None, _read_nothing)

    def stream_request(self, model: str, request: StreamRequest) -> list[Buffer]:
        """Encode a message of a stream."""
        parameters = dict(request.parameters)
        if request.timestamp is not None:
            parameters[TIMESTAMP] = request.timestamp
        return self._infer_request(model, "", _tensors(request.inputs, None), parameters, (), request.id)

    def reply_reader(self) -> Callable[[Buffer], Iterable[StreamReply]]:
        """Return a function that decodes messages of a stream."""
        response_type = self._messages.message_class("inference.ModelStreamInferResponse")

        def read(body: Buffer) -> list[StreamReply]:
            message = response_type.FromString(bytes(body))
            if message.error_message:
                return [StreamReply(error=message.error_message)]
            response = message.infer_response
            timestamp = response.parameters[TIMESTAMP].int64_param if TIMESTAMP in response.parameters else None
            pairs = zip(response.outputs, response.raw_output_contents, strict=True)
            outputs = (StreamOutput(each.name, each.datatype, tuple(each.shape), raw) for each, raw in pairs)
            return [StreamReply(tuple(outputs), timestamp)]

        return read

    def _call(self, method: str, read: Callable[[Any], T], **fields: Any) -> ClientCall[T]:
        try:
            request = self._messages.message_class(f"inference.{method}Request")(**fields)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"a request cannot be written as a message: {error}") from None
        response_type = self._messages.message_class(f"inference.{method}Response")
        return ClientCall(
            self._head(method),
            [request.SerializeToString()],
            lambda answer: read(response_type.FromString(bytes(answer.body))),
        )

    def server_metadata(self) -> ClientCall[ServerInfo]:
        """Return a ``ServerMetadata`` call."""
        return self._call(
            "ServerMetadata", lambda found: ServerInfo(found.name, found.version, tuple(found.extensions))
        )

    def metadata(self, model: str, version: str) -> ClientCall[ModelInfo]:
        """Return a ``ModelMetadata`` call."""

        def read(found: Any) -> ModelInfo:
            inputs, outputs = (
                tuple(TensorInfo(each.name, each.datatype, tuple(each.shape)) for each in side)
                for side in (found.inputs, found.outputs)
            )
            return ModelInfo(found.name, tuple(found.versions), found.platform, inputs, outputs)

        return self._call("ModelMetadata", read, name=model, version=version)

    def models(self) -> ClientCall[list[ModelState]]:
        """Return a ``RepositoryIndex`` call."""
        return self._call(
            "RepositoryIndex",
            lambda found: [ModelState(each.name, each.version, each.state, each.reason) for each in found.models],
        )

    def server_live(self) -> ClientCall[bool]:
        """Return a ``ServerLive`` call."""
        return self._call("ServerLive", lambda found: bool(found.live))

    def server_ready(self) -> ClientCall[Health]:
        """Return a ``ServerReady`` call; gRPC has no reasons."""
        return self._call("ServerReady", lambda found: Health(bool(found.ready)))

    def model_ready(self, model: str, version: str) -> ClientCall[Health]:
        """Return a ``ModelReady`` call; gRPC has no reasons."""
        return self._call("ModelReady", lambda found: Health(bool(found.ready)), name=model, version=version)

    def load(self, model: str, config: Mapping[str, Any] | None) -> ClientCall[None]:
        """Return a ``RepositoryModelLoad`` call."""
        call = self._call("RepositoryModelLoad", _read_nothing, model_name=model)
        if config is not None:
            request = self._messages.message_class("inference.RepositoryModelLoadRequest")(model_name=model)
            request.parameters["config"].string_param = _json(config).decode()
            call.body = [request.SerializeToString()]
        return call

    def unload(self, model: str) -> ClientCall[None]:
        """Return a ``RepositoryModelUnload`` call."""
        return self._call("RepositoryModelUnload", _read_nothing, model_name=model)

    def reload_config(self) -> ClientCall[bool]:
        """Raise ``NotSupported``."""
        raise NotSupported("the configuration cannot be reloaded over gRPC: use REST")

    def sequences(self, model: str, version: str) -> ClientCall[list[SequenceState]]:
        """Raise ``NotSupported``."""
        where = f"version {version} of {model!r}" if version else repr(model)
        raise NotSupported(f"sequences of {where} are not available over gRPC: use REST")

    def metrics(self, families: Sequence[str]) -> ClientCall[str]:
        """Raise ``NotSupported``."""
        del families
        raise NotSupported("metrics are not available over gRPC: use REST")

    def profile(self, seconds: float, rate: float, models: Sequence[str] | None) -> ClientCall[dict[str, Any]]:
        """Raise ``NotSupported``."""
        del seconds, rate, models
        raise NotSupported("profiles are not available over gRPC: use REST")

    def post(self, service: str, body: bytes, content_type: str) -> ClientCall[Posted]:
        """Raise ``NotSupported``."""
        del body, content_type
        raise NotSupported(f"{service!r} is called over HTTP, and not over KServe's gRPC: use REST")

    def chat(self, model: str, messages: Sequence[Any], options: Mapping[str, Any]) -> ClientCall[ChatAnswer]:
        """Raise ``NotSupported``."""
        del messages, options
        raise NotSupported(f"chats with {model!r} are not available over gRPC: use REST")

    def chat_stream(self, model: str, messages: Sequence[Any], options: Mapping[str, Any]) -> ClientCall[None]:
        """Raise ``NotSupported``."""
        del messages, options
        raise NotSupported(f"chats with {model!r} are not available over gRPC: use REST")

    def delta_reader(self) -> Callable[[Buffer], Iterable[ChatDelta | None]]:
        """Raise ``NotSupported``."""
        raise NotSupported("chats are not available over gRPC: use REST")


def _read_nothing(_: object) -> None:
    """Read an answer without content."""


# -- REST --------------------------------------------------------------------------------------------------------------

_HEADER_LENGTH: Final = "inference-header-content-length"
_BINARY: Final = "application/octet-stream"
_JSON: Final = "application/json"
_SUCCESSES: Final = range(200, 300)
_INVALID_SEGMENTS: Final = frozenset({"", ".", ".."})
"""Names that URL normalisation removes."""
_RESERVED_FIELDS: Final = frozenset({"model_name", "model_version", "parameters", "id"})
_JSON_TYPES: Final = frozenset({"bool", "int64", "float64"})
"""Array types that JSON preserves."""
_END_OF_CHAT: Final = b"[DONE]"


class RestCalls:
    """Calls of KServe's REST API with binary tensors, of OVMS's administration, and of OpenAI chat."""

    name: Final = "REST"
    new_link: Final = HttpLink

    def __init__(self, address: ServerAddress, headers: Mapping[str, str]) -> None:
        self._address = address.text
        self._prefix = address.prefix
        self.api_path = "/v3"
        fields = {"Host": address.authority, "User-Agent": "ovmstrio", **headers}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())

    def _head(self, method: str, path: str, fields: str = "") -> bytes:
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fields}{fields}".encode("latin-1")

    def _call(
        self, method: str, path: str, read: Callable[[Answer], T], body: bytes = b"", content_type: str = _JSON
    ) -> ClientCall[T]:
        fields = f"Content-Type: {content_type}\r\n" if body else "" if method == "GET" else "Content-Length: 0\r\n"
        return ClientCall(self._head(method, path, fields), [body] if body else (), read)

    def error(self, answer: Answer) -> ServerError | None:
        """Return the error of an answer; None for a success."""
        if answer.status in _SUCCESSES:
            return None
        return error_of_http(answer.status, _reason(answer), answer.headers)

    def infer(  # noqa: PLR0917 - the fields of a request
        self,
        model: str,
        inputs: Mapping[str, Value],
        version: str,
        datatypes: Mapping[str, str] | None,
        parameters: Mapping[str, Parameter] | None,
        outputs: Sequence[str],
        request_id: str,
    ) -> ClientCall[InferResult]:
        """Return an inference with binary tensors."""
        tensors = _tensors(inputs, datatypes)
        document: dict[str, Any] = {
            "inputs": [
                {
                    "name": each.name,
                    "shape": each.shape,
                    "datatype": each.datatype,
                    "parameters": {"binary_data_size": len(each.data)},
                }
                for each in tensors
            ],
            "parameters": {**(parameters or {}), "binary_data_output": True},
        }
        if outputs:
            document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
        if request_id:
            document["id"] = request_id
        head = _json(document)
        fields = f"Content-Type: {_BINARY}\r\nInference-Header-Content-Length: {len(head)}\r\n"
        return ClientCall(
            self._head("POST", f"{_model_path(model, version)}/infer", fields),
            [head, *(each.data for each in tensors)],
            _read_infer,
        )

    def stream(self, model: str) -> ClientCall[None]:
        """Return a ``generate_stream`` call; its body is the only request."""
        fields = f"Content-Type: {_JSON}\r\n"
        return ClientCall(self._head("POST", f"{_model_path(model, '')}/generate_stream", fields), None, _read_nothing)

    def stream_request(self, model: str, request: StreamRequest) -> list[Buffer]:
        """Encode the request of a stream; raises ``InvalidRequest`` if JSON cannot represent an input or parameter."""
        del model
        inputs = {name: _json_value(name, value) for name, value in request.inputs.items()}
        parameters = dict(request.parameters)
        if request.timestamp is not None:
            parameters[TIMESTAMP] = request.timestamp
        document = inputs | ({"parameters": parameters} if parameters else {})
        return [_json(document | ({"id": request.id} if request.id else {}))]

    def reply_reader(self) -> Callable[[Buffer], Iterable[StreamReply]]:
        """Return a function that decodes parts of a stream."""
        events = EventReader()
        return lambda part: (_reply(kind, orjson.loads(data)) for kind, data in events.feed(part))

    def server_metadata(self) -> ClientCall[ServerInfo]:
        """Return a ``GET /v2`` call."""

        def read(answer: Answer) -> ServerInfo:
            found = orjson.loads(answer.body)
            return ServerInfo(found["name"], found["version"], tuple(found["extensions"]))

        return self._call("GET", "/v2", read)

    def metadata(self, model: str, version: str) -> ClientCall[ModelInfo]:
        """Return a metadata call."""

        def read(answer: Answer) -> ModelInfo:
            found = orjson.loads(answer.body)
            inputs, outputs = (
                tuple(TensorInfo(each["name"], each["datatype"], tuple(each["shape"])) for each in found[side])
                for side in ("inputs", "outputs")
            )
            return ModelInfo(found["name"], tuple(found["versions"]), found["platform"], inputs, outputs)

        return self._call("GET", _model_path(model, version), read)

    def models(self) -> ClientCall[list[ModelState]]:
        """Return a call of the repository's index."""

        def read(answer: Answer) -> list[ModelState]:
            return [
                ModelState(each["name"], each.get("version", ""), each.get("state", ""), each.get("reason", ""))
                for each in orjson.loads(answer.body)
            ]

        return self._call("POST", "/v2/repository/index", read)

    def server_live(self) -> ClientCall[bool]:
        """Return a liveness call."""
        call = self._call("GET", "/v2/health/live", lambda answer: answer.status in _SUCCESSES)
        call.reads_failures = True
        return call

    def server_ready(self) -> ClientCall[Health]:
        """Return a readiness call."""
        return self._health("/v2/health/ready")

    def model_ready(self, model: str, version: str) -> ClientCall[Health]:
        """Return a readiness call of a model."""
        return self._health(f"{_model_path(model, version)}/ready")

    def _health(self, path: str) -> ClientCall[Health]:
        def read(answer: Answer) -> Health:
            return Health(ready=True) if answer.status in _SUCCESSES else Health(ready=False, reason=_reason(answer))

        call = self._call("GET", path, read)
        call.reads_failures = True
        return call

    def load(self, model: str, config: Mapping[str, Any] | None) -> ClientCall[None]:
        """Return a load call."""
        parameters = {} if config is None else {"parameters": {"config": _json(config).decode()}}
        path = f"/v2/repository/models/{_segment(model)}/load"
        return self._call("POST", path, _read_nothing, _json(parameters))

    def unload(self, model: str) -> ClientCall[None]:
        """Return an unload call."""
        return self._call("POST", f"/v2/repository/models/{_segment(model)}/unload", _read_nothing, b"{}")

    def reload_config(self) -> ClientCall[bool]:
        """Return a reload of the configuration."""
        return self._call("POST", "/v1/config/reload", lambda answer: answer.status == HTTPStatus.CREATED)

    def sequences(self, model: str, version: str) -> ClientCall[list[SequenceState]]:
        """Return a call of the live sequences."""

        def read(answer: Answer) -> list[SequenceState]:
            return [SequenceState(**each) for each in orjson.loads(answer.body)["sequences"]]

        return self._call("GET", f"{_model_path(model, version)}/sequences", read)

    def metrics(self, families: Sequence[str]) -> ClientCall[str]:
        """Return a call of the metrics."""
        query = f"?{urlencode([('match[]', name) for name in families])}" if families else ""
        return self._call("GET", f"/metrics{query}", lambda answer: bytes(answer.body).decode())

    def profile(self, seconds: float, rate: float, models: Sequence[str] | None) -> ClientCall[dict[str, Any]]:
        """Return a profile call."""
        parameters = {"seconds": seconds, "rate": rate} | ({} if models is None else {"models": list(models)})

        def read(answer: Answer) -> dict[str, Any]:
            document: dict[str, Any] = orjson.loads(answer.body)
            return document

        return self._call("POST", "/v2/profile", read, _json(parameters))

    def post(self, service: str, body: bytes, content_type: str) -> ClientCall[Posted]:
        """Return a call of a service with its own HTTP paths."""

        def read(answer: Answer) -> Posted:
            return Posted(bytes(answer.body), answer.headers.get("content-type", ""))

        if not (content_type.isascii() and content_type.isprintable()):
            raise InvalidRequest(f"{content_type!r} is no content type")
        return self._call("POST", f"/{_segment(service)}", read, body, content_type)

    def chat(self, model: str, messages: Sequence[Any], options: Mapping[str, Any]) -> ClientCall[ChatAnswer]:
        """Return a chat completion."""
        body = _json({"model": model, "messages": list(messages), **options})
        return self._call(
            "POST", f"{self.api_path}/chat/completions", lambda answer: read_answer(orjson.loads(answer.body)), body
        )

    def chat_stream(self, model: str, messages: Sequence[Any], options: Mapping[str, Any]) -> ClientCall[None]:
        """Return a chat completion whose deltas are streamed."""
        fields = {"model": model, "messages": list(messages), "stream": True, **options}
        body = _json({**fields, "stream_options": {"include_usage": True}})
        return self._call("POST", f"{self.api_path}/chat/completions", _read_nothing, body)

    def chat_models(self) -> ClientCall[list[str]]:
        """Return a call of the names of models, text generation models first."""

        def read(answer: Answer) -> list[str]:
            return [str(each["id"]) for each in orjson.loads(answer.body)["data"]]

        return self._call("GET", f"{self.api_path}/models", read)

    def delta_reader(self) -> Callable[[Buffer], Iterable[ChatDelta | None]]:
        """Return a function that decodes parts of a streamed chat; None is the end."""
        events = EventReader()

        def read(part: Buffer) -> Iterator[ChatDelta | None]:
            for _, data in events.feed(part):
                yield None if data == _END_OF_CHAT else read_delta(orjson.loads(data))

        return read


def single_request(requests: Iterable[StreamRequest]) -> StreamRequest:
    """Return the single request of a REST stream; raises ``InvalidRequest`` if there is not exactly one."""
    found = list(requests)
    if len(found) != 1:
        raise InvalidRequest(f"a stream over REST has one request, got {len(found)}; use gRPC")
    return found[0]


def _segment(name: str) -> str:
    if name in _INVALID_SEGMENTS:
        raise InvalidRequest(f"{name!r} cannot be the name of a model in a URL")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name!r} cannot be written in a URL: {error}") from None


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{_segment(model)}"
    return f"{path}/versions/{_segment(version)}" if version else path


def _reason(answer: Answer) -> str:
    try:
        return text_of_error(orjson.loads(answer.body)["error"])
    except (ValueError, LookupError, TypeError):
        text = bytes(answer.body).decode(errors="replace")
        known = {each.value: each.phrase for each in HTTPStatus}
        return text or known.get(answer.status, "")


def _read_infer(answer: Answer) -> InferResult:
    if answer.status == HTTPStatus.NO_CONTENT:
        raise error_of_http(answer.status, "a demultiplexer of the pipeline had nothing to split", answer.headers)
    body = memoryview(answer.body)
    length = answer.headers.get(_HEADER_LENGTH)
    position = len(body) if length is None else int(length)
    document = orjson.loads(body[:position])
    found = InferResult()
    for output in document["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            found[name] = _array(output.get("data", []), datatype, shape)
            continue
        found[name] = from_raw(body[position : position + size], datatype, shape)
        position += size
    found.model, found.version = document.get("model_name", ""), document.get("model_version", "")
    found.id, found.parameters = document.get("id", ""), document.get("parameters", {})
    return found


def _array(data: list[Any], datatype: str, shape: tuple[int, ...]) -> Array:
    if datatype == BYTES.name:
        return bytes_array([each.encode() if isinstance(each, str) else each for each in data], shape)
    dtype = np.float32 if datatype == "BF16" else BY_NAME[datatype].numpy
    return np.array(data, dtype).reshape(shape)


# -- Server-sent events ------------------------------------------------------------------------------------------------


class EventReader:
    """Parser of server-sent events, fed with parts of a body."""

    def __init__(self) -> None:
        self._pending = b""
        self._kind = b""
        self._data: list[bytes] = []

    def feed(self, part: Buffer) -> Iterator[tuple[bytes, bytes]]:
        """Yield name and data of each event with data that is complete now."""
        # Only LF ends a line, because JSON may contain Unicode line separators.
        *lines, self._pending = (self._pending + bytes(part)).split(b"\n")
        for line_end in lines:
            line = line_end.removesuffix(b"\r")
            if line:
                field, _, value = line.partition(b":")
                value = value.removeprefix(b" ")
                if field == b"event":
                    self._kind = value
                elif field == b"data":
                    self._data.append(value)
                continue
            kind, data, self._kind, self._data = self._kind, self._data, b"", []
            if data:
                yield kind, b"\n".join(data)


def _json_value(name: str, value: Value) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"input {name}: expected UTF-8 text over REST, got other bytes; use gRPC") from None
    array = to_array(name, value)
    if array.dtype.kind == "U":
        return array.tolist()
    if array.dtype.name not in _JSON_TYPES:
        allowed = ", ".join(sorted(_JSON_TYPES))
        raise InvalidRequest(
            f"input {name}: over REST, {array.dtype.name} would arrive as another type; use gRPC, or one of {allowed}"
        )
    return array.tolist()


def _reply(kind: bytes, document: dict[str, Any]) -> StreamReply:
    if kind == b"error":
        return StreamReply(error=text_of_error(document.get("error", document)))
    outputs = tuple(
        StreamOutput(name, "JSON", (len(value),) if isinstance(value, list) else (), value)
        for name, value in document.items()
        if name not in _RESERVED_FIELDS
    )
    return StreamReply(outputs, document.get("parameters", {}).get(TIMESTAMP))
