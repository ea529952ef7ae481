"""A small service with all four kinds of call, as betterproto2 would generate it, over plain bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final

import trio
from betterproto2.grpclib.grpclib_server import ServiceBase
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from ovmstrio.transport.grpc.call import Call, current_call
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.server import GrpclibService, GrpcServer
from ovmstrio.transport.listeners import open_listeners

__all__ = ["BytesCodec", "Echo", "echo_server", "serving"]

_remembered: Final[ContextVar[str]] = ContextVar("remembered", default="nothing")


class BytesCodec(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: Any) -> bytes:
        return message

    def decode(self, data: bytes, message_type: Any) -> bytes:
        if data.startswith(b"undecodable"):
            raise ValueError("these bytes are no message")
        return data


class Echo(ServiceBase):
    """Echo service that records the calls of its handlers.

    Attributes:
        started: the paths of the calls that began.
        cancelled_at: trio clock time of each cancellation that a handler saw.
        produced: messages that ``Split`` has handed to the transport.
        closed_generators: how many generators of ``Split`` have run their ``finally``.
        changed: set, and replaced, whenever one of these changes.
        released: lets ``Stubborn`` end, and ``Remember`` go on.
        tasks: that answered ``Unary``.
    """

    async def _call_rpc_handler_server_stream(self, handler: Any, stream: Any, request: Any) -> None:
        # The generated code leaves a cancelled generator to the garbage collector.
        async with aclosing(handler(request)) as responses:
            async for response in responses:
                await stream.send_message(response)

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled_at: list[float] = []
        self.produced = 0
        self.closed_generators = 0
        self.changed = trio.Event()
        self.released = trio.Event()
        self.tasks: list[trio.lowlevel.Task] = []

    def note(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def wait_cancelled(self, count: int = 1) -> None:
        while len(self.cancelled_at) < count:
            await self.changed.wait()

    async def wait_started(self, count: int = 1) -> None:
        while len(self.started) < count:
            await self.changed.wait()

    async def _unary(self, stream: Call) -> None:
        self.tasks.append(trio.lowlevel.current_task())
        await stream.send_message(await stream.recv_message())

    async def _remember(self, stream: Call) -> None:
        text = (await stream.recv_message()).decode()
        values = [_remembered.get()]
        _remembered.set(text)
        if text == "wait":
            self.started.append(stream.path)
            self.note()
            await self.released.wait()
            values.append(_remembered.get())
        await stream.send_message(", ".join(values).encode())

    async def _split(self, message: bytes) -> AsyncIterator[bytes]:
        count, size = map(int, message.split())
        try:
            for _ in range(count):
                self.produced += 1
                yield b"s" * size
        finally:
            self.closed_generators += 1
            self.note()

    async def _join(self, stream: Call) -> None:
        await stream.send_message(b"".join([message async for message in stream]))

    async def _chat(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    async def _wait(self, stream: Call) -> None:
        self.started.append(stream.path)
        self.note()
        try:
            if stream.handler.cardinality.server_streaming:
                await stream.send_message(b"waiting")
            await trio.sleep_forever()
        finally:
            self.cancelled_at.append(trio.current_time())
            self.note()

    async def _stubborn(self, stream: Call) -> None:
        self.started.append(stream.path)
        self.note()
        with trio.CancelScope(shield=True):
            await self.released.wait()
        raise ZeroDivisionError

    async def _fail(self, stream: Call) -> None:
        kind = await stream.recv_message()
        if kind == b"details":
            raise GRPCError(Status.FAILED_PRECONDITION, "naïve 100% → über", b"\x00\x01details")
        if kind == b"group":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._raise_not_found)
                await trio.sleep_forever()
        if kind == b"silent":
            return
        raise ZeroDivisionError(kind.decode())

    async def _raise_not_found(self) -> None:
        raise GRPCError(Status.NOT_FOUND, "from a child task")

    async def _meta(self, stream: Call) -> None:
        await stream.recv_message()
        call = current_call()
        values = {key: value for key, value in call.metadata.items() if key.startswith("x-")}
        await stream.send_initial_metadata(metadata=values)
        remaining = call.deadline - trio.current_time()
        await stream.send_message(f"{call.client_endpoint} {remaining:.0f}".encode())
        await stream.send_trailing_metadata(metadata={f"{key}": value for key, value in values.items()})

    def __mapping__(self) -> Mapping[str, Handler]:
        async def split(stream: Call) -> None:
            await self._call_rpc_handler_server_stream(self._split, stream, await stream.recv_message())

        async def chat(stream: Call) -> None:
            await self._call_rpc_handler_server_stream(self._chat, stream, aiter(stream))

        table = {
            "Unary": (self._unary, Cardinality.UNARY_UNARY),
            "Split": (split, Cardinality.UNARY_STREAM),
            "Join": (self._join, Cardinality.STREAM_UNARY),
            "Chat": (chat, Cardinality.STREAM_STREAM),
            "Wait": (self._wait, Cardinality.UNARY_UNARY),
            "WaitStream": (self._wait, Cardinality.UNARY_STREAM),
            "Stubborn": (self._stubborn, Cardinality.UNARY_UNARY),
            "Remember": (self._remember, Cardinality.UNARY_UNARY),
            "Fail": (self._fail, Cardinality.UNARY_UNARY),
            "Meta": (self._meta, Cardinality.UNARY_UNARY),
        }
        return {f"/test.Echo/{name}": Handler(func, kind, bytes, bytes) for name, (func, kind) in table.items()}


@asynccontextmanager
async def echo_server(
    limits: TransportLimits | None = None, address: str = "127.0.0.1:0", **options: Any
) -> AsyncIterator[tuple[GrpcServer, Echo, str]]:
    service = Echo()
    async with serving(service, limits, address, **options) as (server, bound):
        yield server, service, bound


@asynccontextmanager
async def serving(
    service: GrpclibService, limits: TransportLimits | None = None, address: str = "127.0.0.1:0", **options: Any
) -> AsyncIterator[tuple[GrpcServer, str]]:
    """Serve a service whose messages are bytes on a real socket."""
    tls = options.pop("tls", None)
    server = GrpcServer([service], BytesCodec(), limits=limits, **options)
    async with open_listeners([address], tls) as listeners, trio.open_nursery() as nursery:
        addresses = await nursery.start(server.serve, listeners)
        yield server, addresses[0]
        nursery.cancel_scope.cancel()
