"""Calls of gRPC services whose handler is in a worker process, as the server has them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.core.errors import ServerError
from ovmstrio.runtimes.handlers.isolated import hosted_rpcs as events
from ovmstrio.work.messages.error_codec import decode_error
from ovmstrio.work.processes import WorkerEnded
from ovmstrio.work.user_code.pumps import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.runtimes.handlers.grpc.rpc_call import RpcCall
    from ovmstrio.runtimes.handlers.grpc.services import Rpc
    from ovmstrio.runtimes.handlers.handler_code import HandlerCode
    from ovmstrio.work.isolation.isolated_code import CodeWorker
    from ovmstrio.work.isolation.remote_generator import RemoteGenerator

__all__ = ["RemoteRpc", "call_row"]

_AHEAD: Final = 4
"""Requests that may wait in the process for a handler; behind them the client's window fills."""
_numbers: Final = itertools.count(1)


def call_row(call: RpcCall) -> list[Any]:
    """Give what a process is told of a call."""
    seconds = None if call.deadline == math.inf else call.deadline - trio.current_time()
    return [call.path, [list(pair) for pair in call.metadata.items()], call.user_agent, call.client_endpoint, seconds]


class RemoteRpc:
    """One call.

    Args:
        rpc: what is called.
        call: the client's.
        code: logs what the handler raises.
    """

    def __init__(self, rpc: Rpc, call: RpcCall, code: HandlerCode) -> None:
        self._rpc = rpc
        self._call = call
        self._code = code
        self._number = next(_numbers)
        self._credit = trio.Semaphore(_AHEAD)
        self._failure: Exception | None = None
        self._unreadable: GRPCError | None = None

    async def first(self) -> list[Any]:
        """Give what the call begins with in the process.

        Raises:
            GRPCError: its request cannot be read.

        Cancellation: while the client sends nothing.
        """
        first = None
        if not self._rpc.client_streaming:
            message = await self._call.recv_message()
            first = message.SerializeToString()
        return [self._number, call_row(self._call), first]

    async def run(self, worker: CodeWorker, told: RemoteGenerator) -> None:
        """Take requests there, and events here, to the end of the call.

        Raises:
            GRPCError: how the call ends, unless it ends well.
            ServerError: the handler met this.

        Cancellation: at once; the call is cancelled there.
        """
        try:
            async with trio.open_nursery() as nursery:
                if self._rpc.client_streaming:
                    nursery.start_soon(self._feed, worker)
                try:
                    await self._take_all(told)
                except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery and its group
                    self._failure = error
                nursery.cancel_scope.cancel()
        finally:
            await told.aclose()
        if self._unreadable is not None:
            raise self._unreadable
        if self._failure is not None:
            raise self._failure

    async def _feed(self, worker: CodeWorker) -> None:
        """Give the process the client's requests, as it takes them."""
        message: Any = self
        while message is not None:
            await self._credit.acquire()
            try:
                message = await self._call.recv_message()
            except (GRPCError, StreamTerminatedError) as error:
                self._unreadable = error if isinstance(error, GRPCError) else None
                worker.forget([self._number, None, True])
                return
            worker.forget([self._number, None if message is None else message.SerializeToString(), False])

    async def _take_all(self, told: RemoteGenerator) -> None:
        while True:
            event = await told.pull()
            if isinstance(event, Failed):
                raise _ended(event.error)
            if not isinstance(event, list) or await self._take(*event):
                return

    async def _take(self, kind: str, *told: Any) -> bool:
        """Do what an event says; True if it is the last.

        Raises:
            GRPCError: it is how the call ends.
            ServerError: it is what the handler met.
        """
        steps: dict[str, Callable[..., Any]] = {
            events.HEADERS: self._send_headers,
            events.REPLY: self._call.send_message,
            events.TRAILERS: self._send_trailers,
        }
        match kind:
            case events.TAKEN:
                self._credit.release()
            case events.CANCEL:
                self._call.cancel()
            case events.LOG:
                self._code.report(decode_error(told[1]), told[0])
            case events.STATUS | events.RAISED:
                raise _failure(*told)
            case events.ENDED:
                return True
            case _:
                await steps[kind](*told)
        return False

    async def _send_headers(self, pairs: list[Any]) -> None:
        await self._call.send_initial_metadata(metadata=[(key, value) for key, value in pairs])

    async def _send_trailers(self, message: str | None, pairs: list[Any]) -> None:
        metadata = [(key, value) for key, value in pairs]
        await self._call.send_trailing_metadata(status_message=message, metadata=metadata)


def _failure(told: Any, *more: Any) -> Exception:
    """Make the error that a call ends with."""
    if not more:
        error = decode_error(told)
        return error if isinstance(error, ServerError) else GRPCError(Status.INTERNAL, type(error).__name__)
    message, details, cause = more
    made = GRPCError(Status(told), message, details)
    made.__cause__ = None if cause is None else decode_error(cause)
    return made


def _ended(error: BaseException) -> Exception:
    if isinstance(error, WorkerEnded):
        return GRPCError(Status.INTERNAL, f"the process that ran this call {error.why}")
    return error if isinstance(error, Exception) else GRPCError(Status.INTERNAL, type(error).__name__)
