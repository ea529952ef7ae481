"""KServe v2 REST client on httpx, with binary tensors."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx
import numpy as np
import orjson

from ovmstrio.client.api import (
    TIMESTAMP,
    Client,
    Health,
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
)
from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.encoding.raw_contents import bytes_array, from_raw
from ovmstrio.encoding.status_errors import Unreachable, error_of_http, reading

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.client.api import Parameter
    from ovmstrio.client.tls import ClientTls
    from ovmstrio.core.tensor import Array, RawTensor

# -- Streams (Triton's ``generate_stream`` with server-sent events) ----------------------------------------------------

_RESERVED_FIELDS: Final = frozenset({"model_name", "model_version", "parameters", "id"})
_JSON_TYPES: Final = frozenset({"bool", "int64", "float64"})
"""Array types that JSON preserves."""


def single_request(requests: Iterable[StreamRequest]) -> StreamRequest:
    """Return the single request of a REST stream; raises ``InvalidRequest`` if there is not exactly one."""
    found = list(requests)
    if len(found) != 1:
        raise InvalidRequest(f"a stream over REST has one request, got {len(found)}; use gRPC")
    return found[0]


def encode_body(request: StreamRequest) -> bytes:
    """Encode the request body; raises ``InvalidRequest`` if JSON cannot represent an input or parameter."""
    inputs = {name: _value(name, value) for name, value in request.inputs.items()}
    parameters = dict(request.parameters)
    if request.timestamp is not None:
        parameters[TIMESTAMP] = request.timestamp
    document = inputs | ({"parameters": parameters} if parameters else {})
    try:
        return orjson.dumps(document | ({"id": request.id} if request.id else {}))
    except TypeError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def _value(name: str, value: Value) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"input {name}: expected UTF-8 text over REST, got other bytes; use gRPC") from None
    if value.dtype.name not in _JSON_TYPES:
        allowed = ", ".join(sorted(_JSON_TYPES))
        raise InvalidRequest(
            f"input {name}: over REST, {value.dtype.name} would arrive as another type; use gRPC, or one of {allowed}"
        )
    return value.tolist()


def read_events(chunks: Iterable[bytes]) -> Iterator[StreamReply]:
    """Parse the events of a stream of replies; raises ``ValueError`` or ``AttributeError`` if they are malformed."""
    for kind, data in split_events(chunks):
        yield _reply(kind, orjson.loads(data))


def split_events(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and data of each server-sent event with data."""
    kind, data = b"", list[bytes]()
    for line in _lines(chunks):
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"event":
                kind = value
            elif field == b"data":
                data.append(value)
            continue
        if data:
            yield kind, b"\n".join(data)
        kind, data = b"", []


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at LF only, because JSON may contain Unicode line separators."""
    pending = b""
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def _reply(kind: bytes, document: dict[str, Any]) -> StreamReply:
    if kind == b"error":
        return StreamReply(error=str(document.get("error", document)))
    outputs = tuple(
        StreamOutput(name, "JSON", (len(value),) if isinstance(value, list) else (), value)
        for name, value in document.items()
        if name not in _RESERVED_FIELDS
    )
    return StreamReply(outputs, document.get("parameters", {}).get(TIMESTAMP))


# -- Client ------------------------------------------------------------------------------------------------------------

_HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_PROFILE_SECONDS: Final = 120.0
"""Additional time for a profile: compiling and running models with timing."""
_INVALID_SEGMENTS: Final = frozenset({"", ".", ".."})
"""Names that URL normalisation removes."""
_BODILESS_ERRORS: Final[dict[int, str]] = {
    HTTPStatus.NO_CONTENT: "a demultiplexer of the pipeline had nothing to split"
}
"""Error texts of responses that cannot have a body."""


class RestClient(Client):
    """Client for ``host:port``; see ``Client``."""

    def __init__(self, address: str, *, timeout: float, tls: ClientTls | None = None, api_key: str = "") -> None:
        scheme = "http" if tls is None else "https"
        self._url = f"{scheme}://{address}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Without TLS, skip loading CA certificates, which takes longer than a call.
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls is None else tls.context()
        try:
            self._http = httpx.Client(base_url=self._url, timeout=timeout, verify=verify, headers=headers)
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"expected HOST:PORT, got {address}: {error}") from None

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _infer(
        self, model: str, version: str, tensors: Sequence[RawTensor], parameters: Mapping[str, Parameter]
    ) -> dict[str, Array]:
        inputs = [
            {
                "name": each.name,
                "shape": each.shape,
                "datatype": each.datatype,
                "parameters": {"binary_data_size": len(each.data)},
            }
            for each in tensors
        ]
        head = orjson.dumps({"inputs": inputs, "parameters": {**parameters, "binary_data_output": True}})
        headers = {_HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
        body = b"".join([head, *(each.data for each in tensors)])
        answer = self._send("POST", f"{_model_path(model, version)}/infer", content=body, headers=headers)
        with reading(self._url):
            return _read_outputs(answer)

    def stream(
        self, model: str, requests: Iterable[StreamRequest], *, timeout: float | None = None
    ) -> Generator[StreamReply]:
        """Stream to a graph with one request; closing the iterator cancels the stream at once."""
        path, body = f"{_model_path(model, '')}/generate_stream", encode_body(single_request(requests))
        stream_timeout = httpx.Timeout(self._http.timeout.connect, read=timeout)
        message = f"no server answers REST at {self._url}"
        try:
            with self._http.stream("POST", path, content=body, timeout=stream_timeout) as answer:
                message = f"the stream from {self._url} broke"
                if not answer.is_success:
                    answer.read()
                    raise error_of_http(answer.status_code, _reason(answer))
                with reading(self._url):
                    yield from read_events(answer.iter_bytes())
        except httpx.ReadTimeout as error:
            raise DeadlineExceeded(f"{self._url} sent no event in time: {error}") from None
        except httpx.RequestError as error:
            raise Unreachable(f"{message}: {error}") from None

    def post(self, service: str, body: bytes, content_type: str) -> Posted:
        """Post a body to a service with its own HTTP paths."""
        answer = self._send("POST", f"/{_segment(service)}", content=body, headers={"Content-Type": content_type})
        return Posted(answer.content, answer.headers.get("Content-Type", ""))

    def server_metadata(self) -> ServerInfo:
        """Return the server's name, version and extensions."""
        answer = self._send("GET", "/v2")
        with reading(self._url):
            document = answer.json()
            return ServerInfo(document["name"], document["version"], tuple(document["extensions"]))

    def metadata(self, model: str, version: str = "") -> ModelInfo:
        """Return inputs, outputs and versions of a model."""
        answer = self._send("GET", _model_path(model, version))
        with reading(self._url):
            document = answer.json()
            inputs, outputs = (
                tuple(TensorInfo(each["name"], each["datatype"], tuple(each["shape"])) for each in document[side])
                for side in ("inputs", "outputs")
            )
            return ModelInfo(document["name"], tuple(document["versions"]), document["platform"], inputs, outputs)

    def models(self) -> list[ModelState]:
        """Return all model versions of the server."""
        answer = self._send("POST", "/v2/repository/index")
        with reading(self._url):
            return [
                ModelState(each["name"], each.get("version", ""), each.get("state", ""), each.get("reason", ""))
                for each in answer.json()
            ]

    def sequences(self, model: str, version: str = "") -> list[SequenceState]:
        """Return the live sequences of a stateful model."""
        answer = self._send("GET", f"{_model_path(model, version)}/sequences")
        with reading(self._url):
            return [SequenceState(**each) for each in answer.json()["sequences"]]

    def metrics(self, families: Sequence[str] = ()) -> str:
        """Return metrics in Prometheus text format, optionally of some families."""
        return self._send("GET", "/metrics", params={"match[]": list(families)}).text

    def profile(self, seconds: float, rate: float, models: Sequence[str] | None = None) -> dict[str, Any]:
        """Profile the server; may take 120 seconds longer than ``seconds``."""
        parameters = {"seconds": seconds, "rate": rate} | ({} if models is None else {"models": list(models)})
        profile_timeout = httpx.Timeout(self._http.timeout.connect, read=seconds + _PROFILE_SECONDS)
        answer = self._send("POST", "/v2/profile", content=orjson.dumps(parameters), timeout=profile_timeout)
        with reading(self._url):
            profile_document: dict[str, Any] = answer.json()
            return profile_document

    def server_live(self) -> bool:
        """Return whether the server is live."""
        return self._request("/v2/health/live").is_success

    def server_ready(self) -> Health:
        """Return the readiness of the server, with the reason."""
        return _health(self._request("/v2/health/ready"))

    def model_ready(self, model: str, version: str = "") -> Health:
        """Return the readiness of a model, with the reason."""
        return _health(self._request(f"{_model_path(model, version)}/ready"))

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self._request(path, method, **options)
        if not answer.is_success or answer.status_code == HTTPStatus.NO_CONTENT:
            raise error_of_http(answer.status_code, _reason(answer))
        return answer

    def _request(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise DeadlineExceeded(f"{self._url} did not answer in time: {error}") from None
        except httpx.RequestError as error:
            raise Unreachable(f"no server answers REST at {self._url}: {error}") from None


def _segment(name: str) -> str:
    if name in _INVALID_SEGMENTS:
        raise InvalidRequest(f"{name!r} cannot be the name of a model in a URL")
    return quote(name, safe="")


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{_segment(model)}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, LookupError, TypeError):
        return answer.text or _BODILESS_ERRORS.get(answer.status_code, answer.reason_phrase)


def _health(answer: httpx.Response) -> Health:
    return Health(ready=True) if answer.is_success else Health(ready=False, reason=_reason(answer))


def _read_outputs(answer: httpx.Response) -> dict[str, Array]:
    length = answer.headers.get(_HEADER_LENGTH)
    head = answer.content if length is None else answer.content[: int(length)]
    position = len(head)
    outputs = {}
    for output in orjson.loads(head)["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            outputs[name] = _from_json(output.get("data", []), datatype, shape)
            continue
        outputs[name] = from_raw(answer.content[position : position + size], datatype, shape)
        position += size
    return outputs


def _from_json(data: list[Any], datatype: str, shape: tuple[int, ...]) -> Array:
    if datatype == BYTES.name:
        return bytes_array([each.encode() for each in data], shape)
    dtype = np.float32 if datatype == "BF16" else BY_NAME[datatype].numpy
    return np.array(data, dtype).reshape(shape)
