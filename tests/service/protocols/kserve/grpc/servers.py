"""gRPC front ends over registries with servables made by code, and the clients of streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import trio

from ovmstrio.config.specs import GraphSpec, ModelSpec
from ovmstrio.core.events import CallEvent, CallObserver
from ovmstrio.encoding.messages import message_class
from ovmstrio.server.front_ends import GrpcFrontEnd
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.registry import Registry
from ovmstrio.telemetry.access_log import RequestLog
from ovmstrio.telemetry.metrics import Metrics
from tests.support.stub_registry import GRAPH, Load, load_scripted, registry_of
from tests.support.waits import WAIT_SECONDS
from tests.unit.transport.grpc.bytes_client import message
from tests.unit.transport.grpc.peers import Peer

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass
class Serving:
    front_end: GrpcFrontEnd
    plane: DataPlane
    registry: Registry
    specs: list[Any]
    address: str = ""

    @property
    def metrics(self) -> str:
        return (self.plane.render_metrics() or b"").decode()

    @property
    def servable(self) -> Any:
        return self.registry.peek(self.specs[0].name)

    async def apply(self, **changes: Any) -> None:
        await self.registry.apply([spec.model_copy(update=changes) for spec in self.specs])

    async def wait(self, event: trio.Event) -> None:
        with trio.fail_after(WAIT_SECONDS):
            await event.wait()


class RecordedCalls(CallObserver):
    def __init__(self) -> None:
        self.events: list[CallEvent] = []

    def call_finished(self, event: CallEvent) -> None:
        self.events.append(event)


@asynccontextmanager
async def serving_grpc(load: Load, specs: Sequence[Any], *, root: str = "", **options: Any) -> AsyncIterator[Serving]:
    """Serve what ``load`` makes of specs; ``options`` are those of the data plane."""
    registry = registry_of(load, poll_seconds=0)
    plane = DataPlane(registry, **options)
    serving = Serving(GrpcFrontEnd(plane, ["127.0.0.1:0"], root=root), plane, registry, list(specs))
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        assert not (await registry.apply(specs)).failures
        (serving.address,) = await nursery.start(serving.front_end.serve)
        plane.begin_serving()
        yield serving
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def streaming_server(repository: Path) -> AsyncIterator[Serving]:
    """Serve ``graph``, which accepts streams, and the model ``echo``."""
    for name in (GRAPH, "echo"):
        (repository / name / "1").mkdir(parents=True)
    graph = GraphSpec(name=GRAPH, base_path=repository / GRAPH, graph_path=repository / GRAPH / "graph.pbtxt")
    specs = [graph, ModelSpec(name="echo", base_path=repository / "echo")]
    async with serving_grpc(load_scripted, specs, metrics=Metrics(), observers=(RequestLog(),)) as serving:
        yield serving


def payload(*, model: str = GRAPH, data: bytes = b"", name: str = "x", **parameters: Any) -> bytes:
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
    channel: Any
    timeout: float = WAIT_SECONDS
    _requests: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        parse = message_class("inference.ModelStreamInferResponse").FromString
        method = self.channel.stream_stream(STREAM, response_deserializer=parse)
        requests: Iterator[bytes] = iter(self._requests.get, None)
        self.call = method(requests, timeout=self.timeout)

    def send(self, *requests: bytes) -> None:
        for request in requests:
            self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def next(self) -> Any:
        return next(self.call)

    def finish(self) -> tuple[list[Any], str, str]:
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
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        yield await Peer(stream).start()


async def start_stream(peer: Peer, *requests: bytes, end: bool = False) -> int:
    stream_id = peer.queue(STREAM, None, end=False)
    peer.h2.send_data(stream_id, b"".join(map(message, requests)), end_stream=end)
    await peer.flush()
    return stream_id
