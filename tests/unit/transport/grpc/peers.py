"""Raw HTTP/2 client over in-memory streams, for valid and hostile frames."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.events
import trio
import trio.testing

from ovmstrio.transport.grpc.frames import FrameType
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.server import GrpcServer
from ovmstrio.transport.send_budget import SendBudget
from tests.unit.transport.grpc.bytes_client import SMALL_LIMITS, message, request_headers
from tests.unit.transport.grpc.echo import BytesCodec, Echo

__all__ = ["Peer", "connected", "memory_server", "received_until_closed"]


class _MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    def __init__(self, make_pair: Callable[[], tuple[Any, Any]]) -> None:
        self._make_pair = make_pair
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](100)

    def connect(self) -> Any:
        client, server = self._make_pair()
        self._send.send_nowait(server)
        return client

    async def accept(self) -> trio.abc.Stream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        self._receive.close()
        await trio.lowlevel.checkpoint()


class Peer:
    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.h2: Any = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.events: list[Any] = []
        self.closed = False
        self._unread = b""

    async def start(self) -> Peer:
        self.h2.initiate_connection()
        await self.flush()
        await self.wait_for(h2.events.RemoteSettingsChanged)
        return self

    async def flush(self) -> None:
        data = self.h2.data_to_send()
        if data:
            await self.stream.send_all(data)

    def queue(self, path: str, body: bytes | None, *extra: tuple[str, str], end: bool = True) -> int:
        stream_id = int(self.h2.get_next_available_stream_id())
        self.h2.send_headers(stream_id, request_headers(path, *extra), end_stream=body is None and end)
        if body is not None:
            self.h2.send_data(stream_id, message(body), end_stream=end)
        return stream_id

    async def request(self, method: str, body: bytes | None = b"", *extra: tuple[str, str], end: bool = True) -> int:
        stream_id = self.queue(f"/test.Echo/{method}", body, *extra, end=end)
        await self.flush()
        return stream_id

    async def read(self) -> bool:
        data = await self.stream.receive_some()
        if not data:
            self.closed = True
            await self.stream.aclose()
            return False
        self._unread += data
        while len(self._unread) >= 9 and len(self._unread) >= (end := 9 + int.from_bytes(self._unread[:3], "big")):
            frame, self._unread = self._unread[:end], self._unread[end:]
            self.events += self.h2.receive_data(frame)
            if frame[3] == FrameType.GOAWAY:
                # h2 takes every GOAWAY for the end, but calls that are open go on after it.
                self.h2.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
        await self.flush()
        return True

    async def wait_for(self, kind: type, stream_id: int | None = None) -> Any:
        while True:
            for event in self.events:
                if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                    return event
            if not await self.read():
                raise AssertionError(f"the connection ended without {kind.__name__}: {self.events}")

    async def wait_closed(self) -> None:
        while await self.read():
            pass

    async def trailers(self, stream_id: int) -> dict[str, str]:
        await self.wait_for(h2.events.StreamEnded, stream_id)
        kinds = (h2.events.ResponseReceived, h2.events.TrailersReceived)
        last = [each for each in self.events if isinstance(each, kinds) and each.stream_id == stream_id][-1]
        return {str(name): str(value) for name, value in last.headers}

    def body(self, stream_id: int) -> bytes:
        parts = [e.data for e in self.events if isinstance(e, h2.events.DataReceived) and e.stream_id == stream_id]
        return b"".join(parts)


async def received_until_closed(stream: Any) -> bytes:
    received = b""
    while data := await stream.receive_some():
        received += data
    return received


@asynccontextmanager
async def memory_server(
    limits: TransportLimits | None = None,
    make_pair: Callable[[], Any] = trio.testing.memory_stream_pair,
    pending: SendBudget | None = None,
    service: Any = None,
) -> AsyncIterator[tuple[GrpcServer, Any, Callable[[], Peer]]]:
    """Serve ``Echo``, or another service, in memory; the third value opens connections."""
    service = service or Echo()
    server = GrpcServer([service], BytesCodec(), limits=limits or SMALL_LIMITS, send_budget=pending)
    listener = _MemoryListener(make_pair)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [listener])
        yield server, service, lambda: Peer(listener.connect())
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(
    limits: TransportLimits | None = None, **options: Any
) -> AsyncIterator[tuple[Peer, GrpcServer, Any]]:
    async with memory_server(limits, **options) as (server, service, connect):
        yield await connect().start(), server, service
