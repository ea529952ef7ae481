"""Calls of a handler's gRPC services in a worker process: what comes and goes by way of the server, as plain data.

::

    server ── requests, by credit ──> RemoteCall ── CallRun ── the handler's method
           <── events: headers, replies, requests taken, the end ──
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.runtimes.handlers.grpc.call_run import CallRun
from ovmstrio.runtimes.handlers.handler_code import HandlerCode
from ovmstrio.work.messages.error_codec import encode_error

if TYPE_CHECKING:
    from ovmstrio.runtimes.handlers.grpc.services import Rpc, UserProto
    from ovmstrio.runtimes.handlers.handler import LoadedHandler

__all__ = [
    "CANCEL",
    "ENDED",
    "HEADERS",
    "LOG",
    "RAISED",
    "REPLY",
    "STATUS",
    "TAKEN",
    "TRAILERS",
    "Events",
    "HostedRpcs",
    "ToldCode",
]

HEADERS: Final = "headers"
REPLY: Final = "reply"
TRAILERS: Final = "trailers"
TAKEN: Final = "taken"
CANCEL: Final = "cancel"
LOG: Final = "log"
STATUS: Final = "status"
RAISED: Final = "raised"
ENDED: Final = "ended"

_AHEAD: Final = 8
"""Events that may wait for whoever takes them to the server."""

_logged: Final[ContextVar[Callable[[BaseException, str], None] | None]] = ContextVar("who logs", default=None)


class ToldCode(HandlerCode):
    """Has the server log what the handler raises in a call."""

    def report(self, error: BaseException, step: str) -> None:
        """Tell of an error, in the call that it is of; elsewhere it is logged here."""
        tell = _logged.get()
        if tell is None:
            super().report(error, step)
        else:
            tell(error, step)


@dataclass(frozen=True, slots=True)
class _Metadata:
    pairs: list[tuple[str, str | bytes]]

    def items(self) -> Iterable[tuple[str, str | bytes]]:
        """Give all pairs in their order."""
        return self.pairs


class _RemoteCall:
    """See :class:`RpcCall`.

    Args:
        rpc: what is called.
        told: path, metadata, user agent, endpoint of the client, and the seconds until the deadline or None.
        emit: takes an event to the server.
        requests: gives what the server has of the client's messages, None after the last.
    """

    def __init__(
        self,
        rpc: Rpc,
        told: list[Any],
        emit: Callable[[list[Any]], Awaitable[None]],
        requests: trio.MemoryReceiveChannel[bytes | None],
        cancel: Callable[[], None],
    ) -> None:
        self.path, pairs, self.user_agent, self.client_endpoint, seconds = told
        self.metadata = _Metadata([(key, value) for key, value in pairs])
        self.deadline = math.inf if seconds is None else trio.current_time() + seconds
        self._rpc = rpc
        self._emit = emit
        self._requests = requests
        self._cancel = cancel

    def cancel(self) -> None:
        """End the call."""
        self._cancel()

    async def recv_message(self) -> Any:
        """Give the next request, None after the last.

        Raises:
            StreamTerminatedError: no more can be read.

        Cancellation: while there is none.
        """
        try:
            data = await self._requests.receive()
        except trio.EndOfChannel:
            raise StreamTerminatedError("no more requests can be read") from None
        await self._emit([TAKEN])
        return None if data is None else self._rpc.request_class.FromString(data)

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        """Send headers."""
        await self._emit([HEADERS, [list(pair) for pair in metadata or ()]])

    async def send_message(self, message: bytes) -> None:
        """Send a reply."""
        await self._emit([REPLY, message])

    async def send_trailing_metadata(self, *, status_message: str | None = None, metadata: Any = None) -> None:
        """Say what goes with the end."""
        await self._emit([TRAILERS, status_message, [list(pair) for pair in metadata or ()]])


class Events:
    """What a call tells the server, one after the other; closing it cancels the call.

    Args:
        scope: of the call.
        received: gives events.
    """

    def __init__(self, scope: trio.CancelScope, received: trio.MemoryReceiveChannel[list[Any]]) -> None:
        self._scope = scope
        self._received = received

    async def take(self) -> list[Any] | None:
        """Give the next event, None after the last.

        Cancellation: while there is none.
        """
        try:
            return await self._received.receive()
        except trio.EndOfChannel:
            return None

    async def aclose(self) -> None:
        """End the call."""
        self._scope.cancel()
        await trio.lowlevel.checkpoint()


class HostedRpcs:
    """The services of a handler.

    Args:
        proto: their messages.
        handler: has a method for each RPC.
        tasks: hosts calls.
    """

    def __init__(self, proto: UserProto, handler: LoadedHandler, tasks: trio.Nursery) -> None:
        self._rpcs = {rpc.path: rpc for rpc in proto.rpcs}
        self._handler = handler
        self._tasks = tasks
        self._requests: dict[int, trio.MemorySendChannel[bytes | None]] = {}

    async def start(self, number: int, told: list[Any], first: bytes | None) -> Events:
        """Begin a call; whoever gets its events closes them.

        Args:
            number: of the call, by which its requests come.
            told: what the server says of it.
            first: its request; None if it has a stream of them.
        """
        # The server gives no more than it has credit for.
        give, take = trio.open_memory_channel[bytes | None](math.inf)
        emit, received = trio.open_memory_channel[list[Any]](_AHEAD)
        if first is not None:
            give.send_nowait(first)
            give.send_nowait(None)
        else:
            self._requests[number] = give
        scope = trio.CancelScope()

        def cancel() -> None:
            self._tasks.start_soon(emit.send, [CANCEL])

        rpc = self._rpcs[told[0]]
        call = _RemoteCall(rpc, told, emit.send, take, cancel)
        self._tasks.start_soon(partial(self._run, rpc, call, scope, emit, number))
        await trio.lowlevel.checkpoint()
        return Events(scope, received)

    def give(self, number: int, data: bytes | None, *, is_broken: bool) -> None:
        """Give a call a request, None after the last; ``is_broken`` if no more can be read."""
        channel = self._requests.get(number)
        if channel is None:
            return
        if not is_broken:
            channel.send_nowait(data)
        if is_broken or data is None:
            self._requests.pop(number).close()

    async def _run(
        self, rpc: Rpc, call: _RemoteCall, scope: trio.CancelScope, emit: trio.MemorySendChannel[list[Any]], number: int
    ) -> None:
        errors: list[list[Any]] = []
        _logged.set(lambda error, step: errors.append([LOG, step, encode_error(error)]))
        with scope, emit:
            end = await self._end(rpc, call)
            for event in (*errors, end):
                await emit.send(event)
        self._requests.pop(number, None)

    async def _end(self, rpc: Rpc, call: _RemoteCall) -> list[Any]:
        try:
            await CallRun(rpc, call, self._handler).run()
        except GRPCError as error:
            cause = error.__cause__
            told = None if cause is None else encode_error(cause)
            return [STATUS, Status(error.status).value, error.message, error.details, told]
        except StreamTerminatedError:
            return [STATUS, Status.CANCELLED.value, "the call is over", None, None]
        except Exception as error:  # noqa: BLE001 - told to the server
            return [RAISED, encode_error(error)]
        return [ENDED]
