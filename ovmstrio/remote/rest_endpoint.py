"""KServe v2 REST client of a remote model, with binary tensors."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx
import orjson

from ovmstrio.core.errors import DeadlineExceeded, ModelFailure, NotReady, PayloadTooLarge
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.encoding.raw_contents import buffer_of, framed
from ovmstrio.encoding.status_errors import error_of_http
from ovmstrio.remote.endpoint import NotSent, RemoteDescription, append_address, make_tensor_spec
from ovmstrio.remote.grpc_endpoint import input_buffers, make_output, remote_parameters
from ovmstrio.telemetry.spans import current_or_event_span
from ovmstrio.util.response_bodies import read_limited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.config.remote_entries import RemoteAddress, RemoteSpec
    from ovmstrio.core.request import Buffer, InferRequest

_HEAD_SIZE: Final = "Inference-Header-Content-Length"
_CONNECTIONS: Final = 256
_MAX_BYTES: Final = 2**31 - 1
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class RestEndpoint:
    """REST endpoint over a connection pool; plain HTTP without ``tls``."""

    def __init__(self, spec: RemoteSpec, address: RemoteAddress, tls: ssl.SSLContext | None) -> None:
        self.address = str(address)
        self._spec = spec
        version = f"/versions/{quote(spec.remote_version, safe='')}" if spec.remote_version else ""
        self._path = f"/v2/models/{quote(spec.remote_name, safe='')}{version}"
        self._extensions = {"sni_hostname": spec.tls.server_name} if spec.tls.server_name else {}
        self._client = httpx.AsyncClient(
            base_url=self.address,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls is None else tls,
            timeout=httpx.Timeout(None, connect=spec.connect_seconds),
            limits=httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS),
            trust_env=False,
        )

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """Run one inference, as :meth:`Endpoint.infer`; the server notices a timeout by the closed connection."""
        del seconds
        pieces, head = _request_pieces(request)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(sum(map(len, pieces))),
            _HEAD_SIZE: str(head),
        }
        response, body = await self._send(
            "POST", f"{self._path}/infer", headers, pieces, min(request.max_output_bytes * 2 + 2**20, _MAX_BYTES)
        )
        self._check(response, body)
        try:
            return _read_response(response, body)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelFailure(f"{self.address} does not answer as a KServe v2 server does: {error}") from None

    async def describe(self) -> RemoteDescription:
        """Return the model's metadata."""
        response, body = await self._send("GET", self._path, {}, (), _MAX_BYTES)
        self._check(response, body)
        try:
            document = orjson.loads(body)
            inputs, outputs = (
                sorted(
                    (
                        make_tensor_spec(each["name"], each["datatype"], map(int, each.get("shape", ())))
                        for each in document[side]
                    ),
                    key=lambda each: each.name,
                )
                for side in ("inputs", "outputs")
            )
            return RemoteDescription(str(document.get("platform", "")), tuple(inputs), tuple(outputs))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelFailure(f"{self.address} does not answer as a KServe v2 server does: {error}") from None

    async def unready_reason(self) -> str:
        """Return why the model cannot be called; empty if it can."""
        response, body = await self._send("GET", f"{self._path}/ready", {}, (), _MAX_BYTES)
        return "" if response.is_success else _reason(response, body)

    def doubt(self) -> None:
        """Do nothing: a timed-out call closes its connection."""

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _send(
        self, method: str, path: str, headers: dict[str, str], pieces: Sequence[Buffer], limit: float
    ) -> tuple[httpx.Response, bytearray]:
        content = _stream_pieces(pieces) if pieces else None
        span = current_or_event_span()
        if span is not None:
            headers = {**headers, **dict(span.headers())}
        try:
            request = self._client.build_request(
                method, path, headers=headers, content=content, extensions=self._extensions
            )
            response = await self._client.send(request, stream=True)
            try:
                body = await read_limited(response, limit)
            finally:
                await response.aclose()
        except _NOT_SENT as error:
            raise NotSent(f"{self.address} cannot be reached: {str(error) or type(error).__name__}") from None
        except httpx.TimeoutException:
            raise DeadlineExceeded(f"{self.address} did not answer in time") from None
        except httpx.HTTPError as error:
            raise NotReady(f"no response from {self.address}: {str(error) or type(error).__name__}") from None
        if len(body) > limit:
            raise PayloadTooLarge(f"response of {self.address} exceeds {limit:.0f} bytes (--max-message-size)")
        return response, body

    def _check(self, response: httpx.Response, body: bytearray) -> None:
        if not response.is_success:
            error = error_of_http(response.status_code, _reason(response, body), response.headers)
            raise append_address(error, self.address)


async def _stream_pieces(pieces: Sequence[Buffer]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece if isinstance(piece, bytes) else bytes(piece)


def _request_pieces(request: InferRequest) -> tuple[list[Buffer], int]:
    buffers = input_buffers(request)
    document: dict[str, Any] = {
        "inputs": [
            {
                "name": given.name,
                "datatype": given.datatype,
                "shape": given.shape,
                "parameters": {**remote_parameters(given.parameters), "binary_data_size": len(buffer)},
            }
            for given, buffer in zip(request.inputs, buffers, strict=True)
        ],
        "parameters": {**remote_parameters(request.parameters), "binary_data_output": True},
    }
    if request.id:
        document["id"] = request.id
    if request.outputs:
        document["outputs"] = [{"name": each.name, "parameters": {"binary_data": True}} for each in request.outputs]
    head = orjson.dumps(document)
    return [head, *buffers], len(head)


def _read_response(response: httpx.Response, body: bytearray) -> InferResponse:
    size = int(response.headers.get(_HEAD_SIZE, len(body)))
    view = memoryview(body)
    document = orjson.loads(view[:size])
    position, outputs = size, []
    for each in document["outputs"]:
        name, datatype, shape = each["name"], each["datatype"], tuple(each["shape"])
        count = each.get("parameters", {}).get("binary_data_size")
        if count is None:
            data = _pack(each["data"], datatype)
        else:
            data = view[position : position + count]
            position += count
        outputs.append(make_output(name, datatype, shape, data))
    parameters = document.get("parameters", {})
    return InferResponse("", "", outputs, "", parameters, is_private=True)


def _pack(values: list[Any], datatype: str) -> Buffer:
    import numpy as np  # noqa: PLC0415 - only for servers without binary tensors

    known = BY_NAME[datatype]
    if known is BYTES:
        return framed(str(each).encode() for each in np.array(values, dtype=object).flat)
    return buffer_of(np.array(values, known.numpy))


def _reason(response: httpx.Response, body: bytearray) -> str:
    try:
        document = orjson.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        document = body[:1000].decode(errors="replace")
    return str(document) or f"HTTP status {response.status_code}"
