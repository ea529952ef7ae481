"""A request over HTTP as the only packet of a graph's input, and packets of its output as documents."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ovmstrio.core.errors import DeadlineExceeded, ServerError
from ovmstrio.core.payloads import PayloadDocument
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import RawTensor
from ovmstrio.runtimes.graphs.graph_failures import graph_failure
from ovmstrio.runtimes.graphs.sinks import to_output
from ovmstrio.util.json_reader import AT_ONCE_BYTES, USER_DOCUMENT, parse_as_python, read_json
from ovmstrio.util.slices import run_to_end
from pyovms import HttpPayload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Any, Protocol

    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.payloads import Documents
    from ovmstrio.runtimes.graphs.graph_stream import GraphStream
    from ovmstrio.runtimes.graphs.packets import Packet

    class OpenDocuments(Protocol):
        """Opens a stream of a graph that gives documents; see ``GraphServable``."""

        def __call__(
            self, first: InferRequest, *, packets: Sequence[tuple[str, Any]], http: HttpRequest
        ) -> AbstractAsyncContextManager[GraphStream[PayloadDocument]]:
            """Open it with packets in the place of those of a request, which is ``http``."""
            ...


__all__ = ["document_of", "open_documents"]

_BINARY = "application/octet-stream"


@asynccontextmanager
async def open_documents(
    graph: str, name: str, open_: OpenDocuments, request: HttpRequest, deadline: float
) -> AsyncIterator[Documents]:
    """Have a graph answer a request that comes in by its input ``name``; see ``PayloadService.open_payload``."""
    first = InferRequest(graph, id=request.header("x-request-id") or "", deadline=deadline)
    is_left = False
    with trio.CancelScope(deadline=deadline) as scope:
        try:
            async with open_(first, packets=[(name, _payload(name, request))], http=request) as stream:
                stream.end()
                yield stream
                is_left = True
        except ServerError:
            # The reader has been told, or wants no more.
            if not is_left:
                raise
    if scope.cancelled_caught:
        raise DeadlineExceeded("the deadline passed before the graph had answered")


def _payload(name: str, request: HttpRequest) -> HttpPayload:
    headers: dict[str, str] = {}
    for key, value in request.headers:
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    head = (request.method, request.target, headers, request.client.host)
    return HttpPayload._received(name, request.body, head, _parse)  # noqa: SLF001 - pyovms's own for the server


def _parse(body: bytes) -> Any:
    """Parse JSON in the thread of user code, in slices so that the event loop runs meanwhile."""
    if len(body) <= AT_ONCE_BYTES:
        return json.loads(body)
    return run_to_end(read_json(body, USER_DOCUMENT, parse=parse_as_python))


def document_of(_: int, packet: Packet) -> PayloadDocument:
    """Make a document of a packet, whose datatype is the type of its content; other tensors are bytes.

    Raises:
        GraphFailure: it is no tensor of a Python node.
    """
    made = to_output("payload", packet.value)
    if not isinstance(made, RawTensor):
        raise graph_failure(f"expected a dict, str, bytes or pyovms.Tensor as an answer, got {type(made).__name__}")
    return PayloadDocument(bytes(made.data), made.datatype if "/" in made.datatype else _BINARY)
