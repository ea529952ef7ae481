"""A gRPC front end over streams made by code, and the clients of streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import h2.events
import trio

from ovmstrio.config.specs import GraphSpec, ModelSpec
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from ovmstrio.observability.request_log import RequestLog
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.registry import Registry
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.support.streaming_servables import GRAPH, ScriptedServable, load_scripted
from tests.support.stub_registry import registry_of
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.bytes_client import message, request_headers
from tests.unit.wire.grpc.peers import Peer

__all__ = ["STREAM", "Caller", "Streaming", "open_peer", "payload", "start_stream", "streaming_server"]

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass
class Streaming:
    """A front end that serves, with what lies behind it."""

    front_end: GrpcFrontEnd
    plane: DataPlane
    registry: Registry
    address: str = ""

    @property
    def servable(self) -> ScriptedServable:
        """What is streamed to."""
        servable = self.registry.peek(GRAPH)
        assert isinstance(servable, ScriptedServable)
        return servable

    @property
    def metrics(self) -> str:
        """Every metric, as text."""
        text = self.plane.render_metrics()
        assert text is not None
        return text.decode()

    async def wait(self, event: trio.Event) -> None:
        """Wait for something that must happen."""
        with trio.fail_after(WAIT_SECONDS):
            await event.wait()


@asynccontextmanager
async def streaming_server(repository: Path) -> AsyncIterator[Streaming]:
    """Serve ``graph``, which can be streamed to, and the model ``echo``."""
    registry = registry_of(load_scripted, poll_seconds=0)
    plane = DataPlane(registry, metrics=Metrics(), observers=(RequestLog(),))
    for name in (GRAPH, "echo"):
        (repository / name / "1").mkdir(parents=True)
    graph = GraphSpec(name=GRAPH, base_path=repository / GRAPH, graph_path=repository / GRAPH / "graph.pbtxt")
    specs = [graph, ModelSpec(name="echo", base_path=repository / "echo")]
    front_end = GrpcFrontEnd(plane, ["127.0.0.1:0"])
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply(specs)
        addresses = await nursery.start(front_end.serve)
        plane.begin_serving()
        yield Streaming(front_end, plane, registry, addresses[0])
        nursery.cancel_scope.cancel()


def payload(*, model: str = GRAPH, data: bytes = b"", name: str = "x", **parameters: Any) -> bytes:
    """Make a request of one input, whose parameters tell the servable what to do."""
    fields = {bool: "bool_param", int: "int64_param", str: "string_param"}
    request = message_class("inference.ModelInferRequest")(
        model_name=model,
        inputs=[{"name": name, "datatype": "words", "shape": [len(data), 7]}],
        raw_input_contents=[data],
        parameters={name: {fields[type(value)]: value} for name, value in parameters.items()},
    )
    serialised: bytes = request.SerializeToString()
    return serialised


@dataclass
class Caller:
    """One stream as grpcio sees it, for use in a thread."""

    channel: Any
    timeout: float = WAIT_SECONDS
    _requests: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        """Begin the call."""
        parse = message_class("inference.ModelStreamInferResponse").FromString
        method = self.channel.stream_stream(STREAM, response_deserializer=parse)
        self.call = method(self._pending(), timeout=self.timeout)

    def _pending(self) -> Iterator[bytes]:
        while (request := self._requests.get()) is not None:
            yield request

    def send(self, request: bytes) -> None:
        """Send one request."""
        self._requests.put(request)

    def end(self) -> None:
        """Send no more."""
        self._requests.put(None)

    def next(self) -> Any:
        """Wait for the next message."""
        return next(self.call)

    def finish(self) -> tuple[list[Any], str, str]:
        """Read to the end without a word; give the messages, the status and its text."""
        messages = []
        try:
            messages.extend(self.call)
        except grpc.RpcError:
            pass
        finally:
            self.end()
        return messages, self.call.code().name, self.call.details()


@asynccontextmanager
async def open_peer(address: str) -> AsyncIterator[Peer]:
    """Connect a bare HTTP/2 client, which never opens a window by itself."""
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        yield await Peer(stream).start()


async def start_stream(peer: Peer, *requests: bytes, end: bool = False) -> int:
    """Begin a stream with requests."""
    stream_id = int(peer.h2.get_next_available_stream_id())
    peer.h2.send_headers(stream_id, request_headers(STREAM))
    peer.h2.send_data(stream_id, b"".join(map(message, requests)), end_stream=end)
    await peer.flush()
    await peer.wait_for(h2.events.RemoteSettingsChanged)
    return stream_id
