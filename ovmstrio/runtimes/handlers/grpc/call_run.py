"""One call of a gRPC service on its way through a handler's method."""

from __future__ import annotations

import inspect
import queue
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import structlog
import trio
from google.protobuf.message import EncodeError
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.core.errors import UserCodeError
from ovmstrio.core.texts import text_of
from ovmstrio.runtimes.handlers.grpc.ends import CallEndedError, WrongReplyError
from ovmstrio.runtimes.handlers.grpc.handler_context import HandlerContext
from ovmstrio.runtimes.handlers.handler_code import HIDDEN
from ovmstrio.runtimes.handlers.http.responses import HTTPError
from ovmstrio.work.user_code.calls import is_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from ovmstrio.runtimes.handlers.grpc.rpc_call import RpcCall
    from ovmstrio.runtimes.handlers.grpc.services import Rpc
    from ovmstrio.runtimes.handlers.handler_class import HandlerMethod

__all__ = ["BlockingRequests", "CallRun"]

_AHEAD: Final = 4
"""Requests that may wait, parsed, for a handler in a thread; behind them the client's window fills."""


class Requests:
    """What both kinds have in common.

    Attributes:
        failure: why no more requests can be read, when that is the client's fault.
    """

    def __init__(self, call: RpcCall) -> None:
        self._call = call
        self.failure: GRPCError | None = None

    async def feed(self) -> None:
        """Receive what has to be received ahead of the handler.

        Cancellation: while the client sends nothing.
        """

    def stop(self) -> None:
        """Let a handler that waits for a request go on: there will be none."""

    async def _receive(self) -> Any:
        """Give the next request, None after the last.

        Raises:
            CallEndedError: no more can be read.
        """
        try:
            return await self._call.recv_message()
        except GRPCError as error:
            self.failure = error
        except StreamTerminatedError:
            pass
        raise CallEndedError


class AsyncRequests(Requests):
    """For handlers on the event loop: nothing is read before it is asked for."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Give the next request.

        Raises:
            StopAsyncIteration: that was the last.
            CallEndedError: no more can be read.

        Cancellation: while the client sends nothing.
        """
        message = await self._receive()
        if message is None:
            raise StopAsyncIteration
        return message


class BlockingRequests(Requests):
    """For handlers in threads: a few requests are read ahead, so that few steps wait for the event loop."""

    def __init__(self, call: RpcCall) -> None:
        super().__init__(call)
        self._loop = trio.lowlevel.current_trio_token()
        self._slots = trio.Semaphore(_AHEAD, max_value=_AHEAD)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: type[Exception] | None = None

    async def feed(self) -> None:
        """Receive requests as fast as the handler takes them, until the last or until none can be read.

        Cancellation: while the client sends nothing, or the handler takes nothing.
        """
        message = object()
        while message is not None:
            await self._slots.acquire()
            try:
                message = await self._receive()
            except CallEndedError:
                self._queue.put(CallEndedError)
                return
            self._queue.put(StopIteration if message is None else message)

    def stop(self) -> None:
        """Let a handler that waits for a request go on: there will be none."""
        self._ended = CallEndedError
        self._queue.put(CallEndedError)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Give the next request, waiting for it; only in threads.

        Raises:
            StopIteration: that was the last.
            CallEndedError: no more can be read.
        """
        if self._ended is not None:
            raise self._ended
        message = self._queue.get()
        if message is StopIteration or message is CallEndedError:
            self._ended = message
            raise message
        self._loop.run_sync_soon(self._slots.release)
        return message


log = structlog.get_logger(__name__)

WRONG_REPLY: Final = "Failed to serialize response!"
"""What the caller is told when a handler gives back something else than the RPC declares."""


def serialised(rpc: Rpc, reply: Any) -> bytes:
    """Serialise a reply, in whatever thread it was made; the handler may change the message afterwards.

    Raises:
        WrongReplyError: it is not a message of the type that the RPC declares, or lacks required fields.
    """
    expected = rpc.reply_class.DESCRIPTOR.full_name
    if not isinstance(reply, rpc.reply_class):
        log.error("a handler's reply is of the wrong type", rpc=rpc.path, expected=expected, found=_kind(reply))
        raise WrongReplyError
    try:
        data: bytes = reply.SerializeToString()
    except EncodeError as error:
        log.error("a handler's reply cannot be serialised", rpc=rpc.path, expected=expected, error=text_of(error))  # noqa: TRY400 - the traceback is the server's own
        raise WrongReplyError from None
    return data


def _kind(reply: Any) -> str:
    descriptor = getattr(reply, "DESCRIPTOR", None)
    return getattr(descriptor, "full_name", None) or type(reply).__name__


_CALLBACK_SECONDS: Final = 2.0
"""How long the callbacks of a call that has ended are waited for."""


class _Replies(Protocol):
    def __aiter__(self) -> AsyncIterator[bytes]:
        """Give replies, serialised."""
        ...

    async def aclose(self) -> None:
        """Stop making them."""
        ...


class RpcMethods(Protocol):
    """The methods of a handler, as a call needs them; see ``LoadedHandler``."""

    @property
    def methods(self) -> Mapping[str, HandlerMethod]:
        """All of them by name."""
        ...

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a method and give what it returns."""
        ...

    async def iterate(self, name: str, convert: Callable[[Any], bytes], /, **arguments: Any) -> _Replies:
        """Call a method that gives many values."""
        ...


class CallRun:
    """One call on its way through the handler."""

    def __init__(self, rpc: Rpc, call: RpcCall, handler: RpcMethods) -> None:
        self._rpc = rpc
        self._call = call
        self._handler = handler
        self._context = HandlerContext(call)
        self._requests: Requests | None = None
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Answer the call; see :meth:`RpcHandler.answer_rpc`."""
        payload = await self._payload()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_after_context)
            if self._requests is not None:
                nursery.start_soon(self._requests.feed)
            try:
                await self._answer(payload)
            except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery and its group
                self._failure = error
            nursery.cancel_scope.cancel()
        await self._conclude()

    async def _payload(self) -> Any:
        if not self._rpc.client_streaming:
            return await self._call.recv_message()
        # A decorator may hide an async method behind a plain one.
        method = inspect.unwrap(self._handler.methods[self._rpc.name].call)
        self._requests = AsyncRequests(self._call) if is_async(method) else BlockingRequests(self._call)
        return self._requests

    async def _answer(self, payload: Any) -> None:
        arguments = {"payload": payload, "context": self._context}
        if self._rpc.server_streaming:
            await self._send_stream(arguments)
        else:
            reply = await self._handler.call(self._rpc.name, **arguments)
            if self._context.is_successful():
                await self._send(serialised(self._rpc, reply))

    async def _send_stream(self, arguments: dict[str, Any]) -> None:
        replies = await self._handler.iterate(self._rpc.name, partial(serialised, self._rpc), **arguments)
        try:
            async for reply in replies:
                await self._send(reply)
        finally:
            await replies.aclose()

    async def _send(self, data: bytes) -> None:
        await self._context.send_waiting_headers()
        await self._call.send_message(data)

    async def _look_after_context(self) -> None:
        try:
            await self._context.watch_headers()
            await trio.sleep_forever()
        finally:
            if self._requests is not None:
                self._requests.stop()
            callbacks = self._context.end()
            if callbacks is not None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CALLBACK_SECONDS):
                    await trio.to_thread.run_sync(callbacks, abandon_on_cancel=True)

    async def _conclude(self) -> None:
        error = self._failure
        if self._requests is not None and self._requests.failure is not None:
            # The handler has met the end of its requests; this is why.
            raise self._requests.failure
        match error:
            case None:
                await self._context.conclude(None)
            case WrongReplyError():
                raise GRPCError(Status.INTERNAL, WRONG_REPLY) from error
            case CallEndedError():
                await self._context.conclude(GRPCError(Status.INTERNAL, HIDDEN))
            case UserCodeError() | HTTPError():
                await self._context.conclude(GRPCError(Status.INTERNAL, HIDDEN), error)
            case _:
                raise error
