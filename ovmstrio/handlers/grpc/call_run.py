"""One call of a gRPC service on its way through a handler's method."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, Self

import structlog
import trio
from google.protobuf.message import EncodeError
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.metadata import encode_metadata

from ovmstrio.core.connection import UNKNOWN, UnixSocket
from ovmstrio.core.errors import UserCodeError
from ovmstrio.handlers.grpc.rpc_call import RpcCall
from ovmstrio.handlers.handler_code import HIDDEN
from ovmstrio.handlers.http_results import HTTPError
from ovmstrio.isolation.user_code import is_async
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ovmstrio.handlers.grpc.services import Rpc
    from ovmstrio.handlers.handler_class import HandlerMethod

__all__ = ["PASSING", "BlockingRequests", "CallEndedError", "CallRun", "HandlerContext", "Metadatum", "WrongReplyError"]

# ----------------------------------------------------------------------
# How calls end besides with a reply
# ----------------------------------------------------------------------


class CallEndedError(Exception):
    """Leaves the handler's code when it has aborted its call, or reads requests of a call that is over.

    It is not logged: the call's status has been said elsewhere.
    """


class WrongReplyError(Exception):
    """A handler gave back what is not a reply of its RPC; that has been logged."""


PASSING: Final = (CallEndedError, WrongReplyError)
"""What passes through a handler's methods as it is."""


# ----------------------------------------------------------------------
# The ``context`` of a call as handlers know it from gRPC's Python servers
# ----------------------------------------------------------------------


def status_of_code(code: Any) -> Status:
    """Translate a ``grpc.StatusCode``, its number or its name.

    Raises:
        ValueError: there is no such status.
    """
    value = getattr(code, "value", code)
    number = value[0] if isinstance(value, tuple) else value
    try:
        return Status[number.upper()] if isinstance(number, str) else Status(number)
    except (KeyError, ValueError):
        raise ValueError(f"{code!r} is no status of gRPC; expected one of grpc.StatusCode") from None


log = structlog.get_logger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]
_NO_CODE: Final = Status.OK
_RICH_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata that belongs to the status itself."""


class Metadatum(NamedTuple):
    """One entry of metadata; the value of a key that ends in ``-bin`` is bytes."""

    key: str
    value: str | bytes


class HandlerContext:
    """What a handler's method gets as ``context``; every method may be called from any thread, and none waits."""

    def __init__(self, call: RpcCall) -> None:
        self._call = call
        self._loop = trio.lowlevel.current_trio_token()
        self._deadline = time.monotonic() + call.deadline - trio.current_time()
        self._received = tuple(Metadatum(*pair) for pair in call.metadata.items())
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], Any]] | None = []
        self._code = _NO_CODE
        self._given_code: Any = None
        self._details = ""
        self._rich_details: bytes | None = None
        self._headers: Collection[tuple[str, str | bytes]] | None = None
        self._headers_allowed = True
        self._headers_given = trio.Event()
        self._trailers: tuple[Metadatum, ...] = ()

    # About the call

    def is_active(self) -> bool:
        """Whether somebody still waits for the reply."""
        return self._callbacks is not None

    def time_remaining(self) -> float | None:
        """Give the seconds until the caller's deadline, None without one."""
        return None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[Metadatum, ...]:
        """Give the metadata that the caller sent, ``user-agent`` included."""
        agent = self._call.user_agent
        return (*self._received, Metadatum("user-agent", agent)) if agent else self._received

    def peer(self) -> str:
        """Return the client: ``ipv4:127.0.0.1:5000``, ``ipv6:[::1]:5000``, ``unix:`` or ``unknown``."""
        endpoint = self._call.client_endpoint
        if endpoint in {UnixSocket.endpoint, UNKNOWN.endpoint}:
            return endpoint
        return f"ipv6:{endpoint}" if endpoint.startswith("[") else f"ipv4:{endpoint}"

    # What the caller is told

    def code(self) -> Any:
        """Give the status as it was set, None before."""
        return self._given_code

    def details(self) -> str:
        """Give the text that was set, empty before."""
        return self._details

    def trailing_metadata(self) -> tuple[Metadatum, ...]:
        """Give the trailing metadata that was set."""
        return self._trailers

    def set_code(self, code: Any) -> None:
        """Set the status that the call ends with: a ``grpc.StatusCode``, or its number.

        Raises:
            ValueError: there is no such status.
        """
        self._code = status_of_code(code)
        self._given_code = code

    def set_details(self, details: str) -> None:
        """Set the text that goes with the status."""
        self._details = str(details)

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        """Set the metadata that goes with the status.

        Raises:
            ValueError: a key or a value cannot be sent.
            TypeError: a value is of the wrong type for its key.
        """
        entries = tuple(Metadatum(*pair) for pair in trailing_metadata)
        rich = [value for key, value in entries if key == _RICH_DETAILS and isinstance(value, bytes)]
        self._trailers = _checked(entry for entry in entries if entry.key != _RICH_DETAILS)
        self._rich_details = rich[-1] if rich else None

    def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        """Send metadata ahead of the first reply, at once; possible once.

        Raises:
            ValueError: it has been sent, alone or with a reply, or cannot be sent.
            TypeError: a value is of the wrong type for its key.
        """
        checked = _checked(initial_metadata)
        with self._lock:
            if not self._headers_allowed:
                raise ValueError("initial metadata can only be sent once, and before the first reply")
            self._headers_allowed = False
            self._headers = checked
        self._on_loop(self._headers_given.set)

    # The end

    def abort(self, code: Any, details: str = "") -> NoReturn:
        """End the call with a status other than OK, at once.

        Raises:
            CallEndedError: always, so that the method ends.
        """
        status = status_of_code(code)
        self._given_code = code
        self._code = Status.UNKNOWN if status is Status.OK else status
        self._details = "" if status is Status.OK else str(details)
        raise CallEndedError(f"aborted with {self._code.name}: {self._details}")

    def abort_with_status(self, status: Any) -> NoReturn:
        """End the call with a status that has its own code, text and trailing metadata, such as rich errors have.

        Raises:
            CallEndedError: always, so that the method ends.
        """
        self.set_trailing_metadata(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def cancel(self) -> None:
        """End the call with CANCELLED; the method is told to stop as if the caller had left."""
        self._on_loop(self._call.cancel)

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Have a function called in a thread when the call has ended, for whatever reason; False if it has already."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    # For the server, on the event loop

    def is_successful(self) -> bool:
        """Whether no status other than OK was set, so that a reply goes with it."""
        return self._code is _NO_CODE

    async def send_waiting_headers(self) -> None:
        """Send initial metadata that waits to be sent; later there can be none.

        Raises:
            StreamTerminatedError: the call is over.
        """
        with self._lock:
            headers, self._headers = self._headers, None
            self._headers_allowed = False
        if headers is not None:
            await self._call.send_initial_metadata(metadata=headers)

    async def watch_headers(self) -> None:
        """Send initial metadata as soon as there is some.

        Cancellation: while there is none.
        """
        await self._headers_given.wait()
        await self.send_waiting_headers()

    async def conclude(self, default: GRPCError | None, cause: Exception | None = None) -> None:
        """Say how the call ends: as the handler has set it, else as ``default`` says, which is None for success.

        ``cause`` is what the handler raised, if anything.

        Raises:
            GRPCError: it does not end well.
            StreamTerminatedError: the call is over.
        """
        await self.send_waiting_headers()
        await self._call.send_trailing_metadata(status_message=self._details or None, metadata=self._trailers)
        status = self._code
        if default is not None and status is _NO_CODE:
            status = default.status
        if status is not _NO_CODE:
            text = self._details or (default.message if default is not None else None)
            raise GRPCError(status, text, self._rich_details) from cause

    def end(self) -> Callable[[], None] | None:
        """Mark the call as over; gives what calls the callbacks, to be run in a thread, None without any."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        return (lambda: _call_all(callbacks, self._call.path)) if callbacks else None

    def _on_loop(self, function: Callable[[], Any]) -> None:
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(function)


def _checked(metadata: Metadata) -> tuple[Metadatum, ...]:
    pairs = tuple(Metadatum(*pair) for pair in metadata)
    encode_metadata(pairs)
    return pairs


def _call_all(callbacks: Iterable[Callable[[], Any]], path: str) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # the border of user code: the callbacks behind it are called all the same
            log.exception("a callback of a call raised", rpc=path)


# ----------------------------------------------------------------------
# One call of a gRPC service on its way through a handler's method
# ----------------------------------------------------------------------

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
