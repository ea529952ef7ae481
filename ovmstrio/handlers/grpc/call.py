"""Calls of a handler's gRPC methods: context object, request iterators, serialization and statuses."""

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
from ovmstrio.handlers.error_reporter import INTERNAL_ERROR
from ovmstrio.handlers.http_responses import HTTPError
from ovmstrio.isolation.user_code import is_async
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from ovmstrio.handlers.grpc.proto_compiler import Rpc
    from ovmstrio.handlers.handler_calls import HandlerCalls

# ----------------------------------------------------------------------
# Interface of a gRPC call to a handler, connected to this process or to the server process
# ----------------------------------------------------------------------

MetadataPairs = Collection[tuple[str, str | bytes]]


class _Metadata(Protocol):
    def items(self) -> Iterable[tuple[str, str | bytes]]: ...


class RpcCall(Protocol):
    """gRPC call with the methods of ``ovmstrio.transport.grpc.call.Call``."""

    @property
    def path(self) -> str:
        """``/package.Service/Method``."""
        ...

    @property
    def deadline(self) -> float:
        """Deadline by trio's clock; infinity without one."""
        ...

    @property
    def client_endpoint(self) -> str:
        """The client: ``host:port``, ``[host]:port``, ``unix:`` or ``unknown``."""
        ...

    @property
    def user_agent(self) -> str:
        """User agent of the client."""
        ...

    @property
    def metadata(self) -> _Metadata:
        """Metadata of the request."""
        ...

    def cancel(self) -> None:
        """Cancel the call with status CANCELLED."""
        ...

    async def recv_message(self) -> Any:
        """Return the next request, None after the last."""
        ...

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        """Send the initial metadata."""
        ...

    async def send_message(self, message: Any) -> None:
        """Send a serialized reply."""
        ...

    async def send_trailing_metadata(self, *, status_message: str | None = None, metadata: Any = None) -> None:
        """Set the status message and trailing metadata."""
        ...


# ----------------------------------------------------------------------
# Calls of a handler's gRPC methods: context object, request iterators, serialization and statuses
# ----------------------------------------------------------------------


class CallEndedError(Exception):
    """Raised into handler code that aborted its call, or that reads requests of an ended call; not logged."""


class InvalidReplyError(Exception):
    """A handler returned an invalid reply, which has been logged."""


NON_FAILURES: Final = (CallEndedError, InvalidReplyError)
"""Exceptions that handler methods may raise without being logged as failures."""


# Context


def to_status(code: Any) -> Status:
    """Convert a ``grpc.StatusCode``, its number or its name to a status; ValueError for others."""
    value = getattr(code, "value", code)
    number = value[0] if isinstance(value, tuple) else value
    try:
        return Status[number.upper()] if isinstance(number, str) else Status(number)
    except (KeyError, ValueError):
        raise ValueError(f"{code!r} is not a gRPC status; expected a grpc.StatusCode") from None


log = structlog.get_logger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]
_NO_CODE: Final = Status.OK
_RICH_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata that belongs to the status."""


class MetadataEntry(NamedTuple):
    """Metadata entry; values of keys that end in ``-bin`` are bytes."""

    key: str
    value: str | bytes


class HandlerContext:
    """The ``context`` argument of a handler's method, like ``grpc.ServicerContext``.

    All methods are thread-safe and never block.
    """

    def __init__(self, call: RpcCall) -> None:
        self._call = call
        self._loop = trio.lowlevel.current_trio_token()
        self._deadline = time.monotonic() + call.deadline - trio.current_time()
        self._received = tuple(MetadataEntry(*pair) for pair in call.metadata.items())
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], Any]] | None = []
        self._code = _NO_CODE
        self._user_code: Any = None
        self._details = ""
        self._rich_details: bytes | None = None
        self._pending_headers: Collection[tuple[str, str | bytes]] | None = None
        self._headers_allowed = True
        self._has_headers = trio.Event()
        self._trailers: tuple[MetadataEntry, ...] = ()

    # Call

    def is_active(self) -> bool:
        """Return whether the call is still running."""
        return self._callbacks is not None

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without a deadline."""
        return None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[MetadataEntry, ...]:
        """Return the metadata of the client, ``user-agent`` included."""
        agent = self._call.user_agent
        return (*self._received, MetadataEntry("user-agent", agent)) if agent else self._received

    def peer(self) -> str:
        """Return the client: ``ipv4:127.0.0.1:5000``, ``ipv6:[::1]:5000``, ``unix:`` or ``unknown``."""
        endpoint = self._call.client_endpoint
        if endpoint in {UnixSocket.endpoint, UNKNOWN.endpoint}:
            return endpoint
        return f"ipv6:{endpoint}" if endpoint.startswith("[") else f"ipv4:{endpoint}"

    def auth_context(self) -> dict[str | None, list[bytes]]:
        """Return the properties of the authenticated client: none, since the server authenticates clients itself."""
        return {}

    def peer_identities(self) -> Iterable[bytes] | None:
        """Return None: no identities of the client's certificate."""
        return None

    def peer_identity_key(self) -> str | None:
        """Return None: no property has the identities of the client."""
        return None

    # Status and metadata

    def set_compression(self, compression: Any) -> None:
        """Accept a compression without effect: replies are sent uncompressed."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: replies are sent uncompressed."""

    def code(self) -> Any:
        """Return the status that was set; None before."""
        return self._user_code

    def details(self) -> str:
        """Return the details that were set; empty before."""
        return self._details

    def trailing_metadata(self) -> tuple[MetadataEntry, ...]:
        """Return the trailing metadata that was set."""
        return self._trailers

    def set_code(self, code: Any) -> None:
        """Set the status of the call: a ``grpc.StatusCode`` or its number; ValueError for others."""
        self._code = to_status(code)
        self._user_code = code

    def set_details(self, details: str) -> None:
        """Set the status message."""
        self._details = str(details)

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        """Set the trailing metadata; ValueError or TypeError if an entry cannot be sent."""
        entries = tuple(MetadataEntry(*pair) for pair in trailing_metadata)
        rich = [value for key, value in entries if key == _RICH_DETAILS and isinstance(value, bytes)]
        self._trailers = _validated(entry for entry in entries if entry.key != _RICH_DETAILS)
        self._rich_details = rich[-1] if rich else None

    def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        """Send initial metadata, once and before the first reply; ValueError otherwise."""
        checked = _validated(initial_metadata)
        with self._lock:
            if not self._headers_allowed:
                raise ValueError("initial metadata can only be sent once, and before the first reply")
            self._headers_allowed = False
            self._pending_headers = checked
        self._call_on_loop(self._has_headers.set)

    # The end

    def abort(self, code: Any, details: str = "") -> NoReturn:
        """End the call with a status other than OK, by raising CallEndedError to leave the method."""
        status = to_status(code)
        self._user_code = code
        self._code = Status.UNKNOWN if status is Status.OK else status
        self._details = "" if status is Status.OK else str(details)
        raise CallEndedError(f"aborted with {self._code.name}: {self._details}")

    def abort_with_status(self, status: Any) -> NoReturn:
        """End the call with code, details and trailing metadata of a ``grpc.Status``."""
        self.set_trailing_metadata(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def cancel(self) -> None:
        """Cancel the call with status CANCELLED."""
        self._call_on_loop(self._call.cancel)

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Register a function to call in a thread when the call ends; return False if it has ended."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    # For the server, on the event loop only

    def is_successful(self) -> bool:
        """Return whether no status other than OK was set."""
        return self._code is _NO_CODE

    async def send_pending_headers(self) -> None:
        """Send pending initial metadata; later calls of ``send_initial_metadata`` fail."""
        with self._lock:
            headers, self._pending_headers = self._pending_headers, None
            self._headers_allowed = False
        if headers is not None:
            await self._call.send_initial_metadata(metadata=headers)

    async def send_headers_when_set(self) -> None:
        """Wait for initial metadata and send it."""
        await self._has_headers.wait()
        await self.send_pending_headers()

    async def finish(self, default: GRPCError | None, cause: Exception | None = None) -> None:
        """Send trailing metadata and raise the status that the handler set, else ``default`` (None: OK).

        ``cause`` is the handler's exception, if any. StreamTerminatedError if the call has ended.
        """
        await self.send_pending_headers()
        await self._call.send_trailing_metadata(status_message=self._details or None, metadata=self._trailers)
        status = self._code
        if default is not None and status is _NO_CODE:
            status = default.status
        if status is not _NO_CODE:
            text = self._details or (default.message if default is not None else None)
            raise GRPCError(status, text, self._rich_details) from cause

    def end(self) -> Callable[[], None] | None:
        """Mark the call as ended; return a function that runs the callbacks, None without callbacks."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        return (lambda: _run_callbacks(callbacks, self._call.path)) if callbacks else None

    def _call_on_loop(self, function: Callable[[], Any]) -> None:
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(function)


def _validated(metadata: Metadata) -> tuple[MetadataEntry, ...]:
    pairs = tuple(MetadataEntry(*pair) for pair in metadata)
    encode_metadata(pairs)
    return pairs


def _run_callbacks(callbacks: Iterable[Callable[[], Any]], path: str) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # user code: the other callbacks must run
            log.exception("call callback failed", rpc=path)


# Requests and replies

_MAX_QUEUED: Final = 4
"""Maximum number of parsed requests queued for a handler in a thread; flow control stops the client beyond it."""


class Requests:
    """Requests of a streaming call.

    Attributes:
        failure: set if the client sent an invalid request.
    """

    def __init__(self, call: RpcCall) -> None:
        self._call = call
        self.failure: GRPCError | None = None

    async def feed(self) -> None:
        """Receive requests before the handler reads them."""

    def stop(self) -> None:
        """Wake a handler that waits for a request: there are no more."""

    async def _receive(self) -> Any:
        try:
            return await self._call.recv_message()
        except GRPCError as error:
            self.failure = error
        except StreamTerminatedError:
            pass
        raise CallEndedError


class AsyncRequests(Requests):
    """Requests for handlers on the event loop, received on demand."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self._receive()
        if message is None:
            raise StopAsyncIteration
        return message


class BlockingRequests(Requests):
    """Requests for handlers in threads; a few are received ahead to avoid waits for the event loop."""

    def __init__(self, call: RpcCall) -> None:
        super().__init__(call)
        self._loop = trio.lowlevel.current_trio_token()
        self._slots = trio.Semaphore(_MAX_QUEUED, max_value=_MAX_QUEUED)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: type[Exception] | None = None

    async def feed(self) -> None:
        """Receive requests as fast as the handler reads them."""
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
        """Wake a handler that waits for a request: there are no more."""
        self._ended = CallEndedError
        self._queue.put(CallEndedError)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._ended is not None:
            raise self._ended
        message = self._queue.get()
        if message is StopIteration or message is CallEndedError:
            self._ended = message
            raise message
        self._loop.run_sync_soon(self._slots.release)
        return message


INVALID_REPLY: Final = "Failed to serialize response!"
"""grpcio's status message for an invalid reply."""


def serialize_reply(rpc: Rpc, reply: Any) -> bytes:
    """Serialize a reply in the thread that created it, since the handler may modify the message afterwards.

    Raises WrongReplyError if the type is not that of the RPC, or required fields are missing.
    """
    expected = rpc.reply_class.DESCRIPTOR.full_name
    if not isinstance(reply, rpc.reply_class):
        log.error("handler reply has wrong type", rpc=rpc.path, expected=expected, found=_type_name(reply))
        raise InvalidReplyError
    try:
        data: bytes = reply.SerializeToString()
    except EncodeError as error:
        log.error("handler reply not serializable", rpc=rpc.path, expected=expected, error=text_of(error))  # noqa: TRY400 - the traceback is the server's own
        raise InvalidReplyError from None
    return data


def _type_name(reply: Any) -> str:
    descriptor = getattr(reply, "DESCRIPTOR", None)
    return getattr(descriptor, "full_name", None) or type(reply).__name__


_CALLBACK_SECONDS: Final = 2.0
"""Maximum time that the end of a call waits for its callbacks."""


class CallExecution:
    """Execution of one call."""

    def __init__(self, rpc: Rpc, call: RpcCall, handler: HandlerCalls) -> None:
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
            nursery.start_soon(self._manage_context)
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
        # Decorators may wrap an async method in a plain one.
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
                await self._send(serialize_reply(self._rpc, reply))

    async def _send_stream(self, arguments: dict[str, Any]) -> None:
        replies = await self._handler.iterate(self._rpc.name, partial(serialize_reply, self._rpc), **arguments)
        try:
            async for reply in replies:
                await self._send(reply)
        finally:
            await replies.aclose()

    async def _send(self, data: bytes) -> None:
        await self._context.send_pending_headers()
        await self._call.send_message(data)

    async def _manage_context(self) -> None:
        try:
            await self._context.send_headers_when_set()
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
            # The cause of the end of requests that the handler saw.
            raise self._requests.failure
        match error:
            case None:
                await self._context.finish(None)
            case InvalidReplyError():
                raise GRPCError(Status.INTERNAL, INVALID_REPLY) from error
            case CallEndedError():
                await self._context.finish(GRPCError(Status.INTERNAL, INTERNAL_ERROR))
            case UserCodeError() | HTTPError():
                await self._context.finish(GRPCError(Status.INTERNAL, INTERNAL_ERROR), error)
            case _:
                raise error
