"""Requests to a model over each interface, for h2load, which always sends the same request."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import grpc
import httpx

from benchmarks.requests import framed_infer_request, framed_message
from ovmstrio.encoding.messages import message_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.matrix.cells import Interface
    from benchmarks.processes import Server
    from ovmstrio.core.tensor import Array

__all__ = ["InferCall", "MeasuredModel", "check_answer", "failure_of", "infer_call", "registered_memory"]

_INPUT, _OUTPUT = "ovmstrio_bench_in", "ovmstrio_bench_out"
_OUTPUT_BYTES = 1 << 16
_ANSWER_SECONDS = 60
_FRAME_HEAD = 5
_ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class HasPorts(Protocol):
    """A running server."""

    @property
    def grpc(self) -> int:
        """Return the gRPC port."""

    @property
    def rest(self) -> int:
        """Return the HTTP port."""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model and its input."""

    model: str
    input: str
    array: Array
    output: str


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request: address, body file, headers, and whether it uses HTTP/1.1."""

    url: str
    body: Path
    headers: tuple[str, ...]
    is_http1: bool


def infer_call(interface: Interface, target: MeasuredModel, server: HasPorts, folder: Path) -> InferCall:
    """Write the body of the request and return the request."""
    body = folder / f"{interface}.body"
    if interface in {"gRPC", "shared memory"}:
        body.write_bytes(_grpc(target) if interface == "gRPC" else _grpc_shared_memory(target))
        url = f"http://127.0.0.1:{server.grpc}/inference.GRPCInferenceService/ModelInfer"
        return InferCall(url, body, ("content-type: application/grpc", "te: trailers"), is_http1=False)
    url = f"http://127.0.0.1:{server.rest}/v2/models/{target.model}/infer"
    if interface == "REST JSON":
        body.write_bytes(_json(target, {"data": target.array.ravel().tolist()}))
        return InferCall(url, body, ("content-type: application/json",), is_http1=True)
    raw = target.array.tobytes()
    head = _json(target, {"parameters": {"binary_data_size": len(raw)}}, {"binary_data": True})
    body.write_bytes(head + raw)
    headers = "content-type: application/octet-stream", f"inference-header-content-length: {len(head)}"
    return InferCall(url, body, headers, is_http1=True)


def _grpc(target: MeasuredModel) -> bytes:
    return framed_infer_request(target.model, target.input, target.array)


def _grpc_shared_memory(target: MeasuredModel) -> bytes:
    request = message_class("inference.ModelInferRequest")(model_name=target.model)
    given = request.inputs.add(name=target.input, datatype="FP32", shape=target.array.shape)
    wanted = request.outputs.add(name=target.output)
    for tensor, region, size in ((given, _INPUT, target.array.nbytes), (wanted, _OUTPUT, _OUTPUT_BYTES)):
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    return framed_message(request)


def _json(target: MeasuredModel, content: dict[str, Any], output: dict[str, Any] | None = None) -> bytes:
    given = {"name": target.input, "shape": target.array.shape, "datatype": "FP32", **content}
    wanted = {"name": target.output, **({} if output is None else {"parameters": output})}
    return json.dumps({"inputs": [given], "outputs": [wanted]}).encode()


def check_answer(call: InferCall) -> None:
    """Send one call and exit if it fails, because the load generator does not see the gRPC status."""
    if failure := failure_of(call):
        sys.exit(f"{call.url}: {failure[:500]}")


def failure_of(call: InferCall) -> str:
    """Send one call; return the error, empty on success."""
    content = call.body.read_bytes()
    parts = urlsplit(call.url)
    if call.is_http1:
        headers = dict(header.split(": ") for header in call.headers)
        answer = httpx.post(call.url, content=content, headers=headers, timeout=_ANSWER_SECONDS)
        return "" if answer.status_code == httpx.codes.OK else answer.text or str(answer.status_code)
    with grpc.insecure_channel(parts.netloc, _ANY_SIZE) as channel:
        try:
            channel.unary_unary(parts.path)(content[_FRAME_HEAD:], timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            return str(error)
    return ""


@contextmanager
def registered_memory(target: MeasuredModel, server: Server) -> Iterator[None]:
    """Register shared memory regions for input and output, until the block ends."""
    regions = {_INPUT: target.array.tobytes(), _OUTPUT: bytes(_OUTPUT_BYTES)}
    try:
        for name, content in regions.items():
            Path("/dev/shm", f"{name}.{os.getpid()}").write_bytes(content)
            url = f"http://127.0.0.1:{server.rest}/v2/systemsharedmemory/region/{name}/register"
            about = {"key": f"/{name}.{os.getpid()}", "offset": 0, "byte_size": len(content)}
            httpx.post(url, json=about).raise_for_status()
        yield
    finally:
        for name in regions:
            Path("/dev/shm", f"{name}.{os.getpid()}").unlink(missing_ok=True)
