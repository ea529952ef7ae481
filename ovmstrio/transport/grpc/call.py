"""gRPC call as seen by its handler: grpclib's ``Stream`` interface on trio."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.metadata import encode_metadata
from multidict import MultiDict

from ovmstrio.core.connection import ClientAddress, Peer
from ovmstrio.core.events import (
    OK,
    REQUEST_ID_HEADER,
    RequestId,
    WireRequest,
    current_request,
    current_request_id,
    record_body,
)
from ovmstrio.encoding.inflate import (
    DEFLATE_BITS,
    GZIP_BITS,
    Inflation,
    InflationError,
    InflationTooLargeError,
    in_inflating_thread,
)
from ovmstrio.transport.grpc.headers import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    ErrorWithTrailers,
    encode_header,
    metadata_block,
    single_error,
    trailers_block,
    trailers_only_block,
)
from ovmstrio.transport.grpc.http2 import ServerStream
from ovmstrio.transport.grpc.messages import ACCEPTED_ENCODINGS, message_prefix
from ovmstrio.transport.grpc.senders import BlockedSenders, Wakeup
from ovmstrio.transport.send_budget import ByteBudget
from ovmstrio.util.buffers import PiecedMessage
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from grpclib.encoding.base import CodecBase

    from ovmstrio.core.events import CallEvent, RequestObserver
    from ovmstrio.core.request import ArrivalOrder, ArrivalTicket
    from ovmstrio.telemetry.log_rate_limit import LogRateLimiter
    from ovmstrio.transport.grpc.headers import ErrorMapper
    from ovmstrio.transport.grpc.http2 import ServerCore
    from ovmstrio.transport.grpc.limits import TransportLimits
    from ovmstrio.transport.send_budget import ConnectionBudget

__all__ = ["Call", "FailureTranslator", "Inflater", "Metadata", "OrderedHandler", "Peer", "current_call"]

log = structlog.get_logger(__name__)

MetadataValue = str | bytes
Metadata = MultiDict[MetadataValue]
MetadataLike = Mapping[str, MetadataValue] | Collection[tuple[str, MetadataValue]]

_HIDDEN_HEADERS: Final = frozenset({"te", "content-type", "user-agent"})
_MESSAGES_PER_CHECKPOINT: Final = 16
"""Messages that a call may send before other tasks run."""
_SERIALISED: Final = (bytes, memoryview, PiecedMessage)
_OK: Final[int] = Status.OK.value


def current_call() -> Call:
    """Return the call that the running task serves; raises ``LookupError`` if there is none."""
    found = current_request.get()
    if isinstance(found, Call):
        return found
    raise LookupError("no gRPC call is served by this task")


class ReusableScope:
    """Cancel scope that a task enters once and uses for consecutive calls.

    A call that never blocks cannot be cancelled meanwhile and leaves the scope unchanged. The first call that blocks
    keeps the scope and the task, and leaves the scope when it ends. Cancelling the scope between calls ends the task.

    Attributes:
        scope: the scope in use.
        is_kept: the current call blocks, or has blocked.
    """

    __slots__ = ("_has_deadline", "_has_exited", "is_kept", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_kept = self._has_exited = self._has_deadline = False

    def __enter__(self) -> Self:
        self.scope.__enter__()
        return self

    def lend(self, deadline: float) -> trio.CancelScope:
        """Return the scope with the deadline of a call, in trio time; ``math.inf`` for none."""
        if deadline != math.inf:
            self._has_deadline, self.scope.deadline = True, deadline
        return self.scope

    def take_back(self, error: BaseException | None) -> bool:
        """Reclaim the scope after a call; return whether the scope caught the call's error."""
        scope = self.scope
        if self.is_kept:
            self._has_exited = True
            return scope.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        if scope.cancel_called:
            scope.__exit__(None, None, None)
            self.scope = trio.CancelScope()
            self.scope.__enter__()
        elif self._has_deadline:
            scope.deadline = math.inf
        self._has_deadline = False
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return False if self._has_exited else self.scope.__exit__(kind, error, traceback)


class OrderedHandler(Handler):
    """Handler of unary requests whose arrival order may matter; its calls have an ``arrival``."""

    __slots__ = ()


class CallHost(Protocol):
    """The connection of a call, as the call uses it; a protocol, because the connection's module imports this one."""

    arrivals: ArrivalOrder
    core: ServerCore
    codec: CodecBase
    limits: TransportLimits
    failures: FailureTranslator
    faults: LogRateLimiter
    inflater: Inflater
    observer: RequestObserver | None
    recorded_body_bytes: int
    count_oversized: Callable[[], object]
    peer: Peer
    senders: BlockedSenders
    share: ConnectionBudget

    @property
    def wake_writer(self) -> Callable[[], None]:
        """Wakes the writer for bytes that wait in the core."""

    @property
    def write_alone(self) -> Callable[[], bool]:
        """Writes the bytes that wait in the core if no other call may have some to add; returns whether it did."""


class Call:
    """One RPC. Handlers get it as grpclib's ``Stream``; service methods get it from ``current_call()``.

    A handler must not keep the call after it returned. The scope is cancelled when the client resets the stream or
    disconnects, when its deadline passes, and when the server stops.

    Attributes:
        path: ``/package.Service/Method``.
        arrival: arrival order of a unary request, if the handler is an :class:`OrderedHandler`.
        deadline: deadline in trio time; ``math.inf`` for none.
        handler: the request handler; it may replace itself before anything is received.
        received: bytes of received messages; ``sent`` likewise.
        event: the call event; None before it exists and after its end.
        record: the request as seen by observers; None if no observer needs it before its end.
    """

    __slots__ = (
        "_handler_status",
        "_has_order",
        "_headers_sent",
        "_host",
        "_inflated",
        "_readable",
        "_replies",
        "_request_id",
        "_requests",
        "_reusable_scope",
        "_scope",
        "_sending",
        "_status",
        "_trailing_metadata",
        "_trailing_status",
        "arrival",
        "deadline",
        "event",
        "failure",
        "handler",
        "path",
        "received",
        "record",
        "sent",
        "state",
    )

    def __init__(self, host: CallHost, state: ServerStream, handler: Handler) -> None:
        head = state.head
        self._host = host
        self.state = state
        self.handler = handler
        self.arrival: ArrivalTicket | None = None
        self._has_order = isinstance(handler, OrderedHandler)
        self.path = head.path
        self.received = self.sent = 0
        self.deadline = math.inf
        if head.timeout_seconds != math.inf:
            self.deadline = trio.current_time() + head.timeout_seconds
        self._scope: trio.CancelScope | None = None
        self._reusable_scope: ReusableScope | None = None
        self.failure: GRPCError | None = None
        self.event: CallEvent | None = None
        self.record: WireRequest | None = None
        self._readable: Wakeup | None = None
        self._requests = 0
        self._inflated = 0
        self._replies = 0
        self._request_id: RequestId | None = None
        self._headers_sent = False
        self._sending = False
        self._trailing_metadata = b""
        self._trailing_status = b""
        self._handler_status = _OK
        self._status = -1

    # -- Properties ----------------------------------------------------------------------------------------------------

    @property
    def scope(self) -> trio.CancelScope:
        """The cancel scope of the handler. Before the handler runs the scope may be replaced."""
        if self._scope is None:
            self._scope = (
                self._reusable_scope.lend(self.deadline)
                if self._reusable_scope
                else trio.CancelScope(deadline=self.deadline)
            )
        return self._scope

    @property
    def peer(self) -> Peer:
        """The other end of the connection."""
        return self._host.peer

    @property
    def client(self) -> ClientAddress:
        """The client's address, from the peer and proxy headers."""
        return self._host.peer.client(self.state.head.headers)

    @property
    def client_endpoint(self) -> str:
        """The client as text: ``host:port``, ``[host]:port``, ``unix:`` or ``unknown``."""
        return self.client.endpoint

    @property
    def metadata(self) -> Metadata:
        """The client's metadata; ``-bin`` values are bytes. Raises ``GRPCError`` if they are not base64."""
        result: Metadata = MultiDict()
        for key, value in self.state.head.headers:
            if key.startswith((":", "grpc-")) or key in _HIDDEN_HEADERS:
                continue
            if not key.endswith("-bin"):
                result.add(key, value)
                continue
            try:
                for part in map(str.strip, value.split(",")):
                    result.add(key, b64decode(part + "=" * (-len(part) % 4), validate=True))
            except ValueError as error:
                raise GRPCError(Status.INVALID_ARGUMENT, f"metadata {key}: expected base64: {error}") from error
        return result

    @property
    def user_agent(self) -> str:
        """The client's ``user-agent``; empty if not sent."""
        return next((value for key, value in self.state.head.headers if key == "user-agent"), "")

    @property
    def half_closed(self) -> bool:
        """True if the client has sent its last message, received here or not."""
        return self.state.is_remote_closed

    def cancel(self, failure: GRPCError | None = None) -> None:
        """Cancel the handler with a status for the client, CANCELLED by default; the first status wins."""
        if self.failure is None:
            self.failure = failure or GRPCError(Status.CANCELLED, "the call was cancelled by the server")
        self.scope.cancel()

    def abandon(self) -> None:
        """Cancel the handler without sending a status, because the client has disconnected."""
        self.state.is_local_closed = self.state.is_remote_closed = True
        self.cancel()

    # -- Receiving -----------------------------------------------------------------------------------------------------

    async def recv_message(self, *, is_decoded: bool = True) -> Any:
        """Receive the next request message; ``None`` at the end of the stream.

        With ``is_decoded=False`` the message is returned as bytes for :meth:`decode`. If the request type is
        ``memoryview``, a large message is a memoryview whose end is aligned in memory, and a small one is bytes.

        Raises:
            GRPCError: the message is too large, truncated, malformed or in an unknown compression, or a unary request
                does not have exactly one message.
            trio.BusyResourceError: another task is receiving.

        Cancellation: a checkpoint for request streams; for a unary request only while its message is incomplete.
        """
        if self._inflated:
            # Requesting the next message means that the previous one has been processed.
            self._release_inflated()
        if self.handler.cardinality.client_streaming:
            await trio.lowlevel.checkpoint()
        buffer, limit = self.state.buffer, self._host.limits.max_receive_message_bytes
        take = buffer.take_aligned if self.handler.request_type is memoryview else buffer.take
        try:
            taken = take(limit)
            while taken is None:
                if self.state.is_remote_closed:
                    return self._end_of_requests()
                await self._wait_readable()
                taken = take(limit)
            flag, data = taken
            self._credit_taken()
            if flag:
                data = await self._inflate(bytes(data))
            self.received += len(data)
            if most := self._host.recorded_body_bytes:
                record_body(data, most)
            return self._decode(data) if is_decoded else data
        except GRPCError as error:
            self._log_fault(error)
            raise

    def decode(self, data: bytes | memoryview) -> Any:
        """Decode a message that was received with ``is_decoded=False``; raises ``GRPCError`` if it is malformed."""
        try:
            return self._decode(data)
        except GRPCError as error:
            self._log_fault(error)
            raise

    def _log_fault(self, error: GRPCError) -> None:
        if error.status is Status.RESOURCE_EXHAUSTED:
            self._host.count_oversized()
        self._host.faults.log_fault(
            "request decoding failed",
            peer=self.peer.address.endpoint,
            kind=error.status.name,
            path=self.path,
            status=error.status.name,
            reason=error.message,
        )

    async def _wait_readable(self) -> None:
        if self.state.uncredited:
            # A waiting reader needs window for the complete message; otherwise partial messages fill the window.
            self._host.core.consume(self.state, self.state.uncredited)
            self._host.wake_writer()
        if self._readable is None:
            self._readable = Wakeup()
        await self._readable.wait()

    def _credit_taken(self) -> None:
        state = self.state
        self._requests += 1
        if state.uncredited > state.buffer.size:
            self._host.core.consume(state, state.uncredited - state.buffer.size)
            self._host.wake_writer()
        if state.buffer.size and not self.handler.cardinality.client_streaming:
            raise GRPCError(Status.UNIMPLEMENTED, f"{self.path}: expected one request message, got more")

    def _end_of_requests(self) -> None:
        if self.state.buffer.size:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{self.path}: the request ends with an incomplete message")
        if not self._requests and not self.handler.cardinality.client_streaming:
            raise GRPCError(Status.UNIMPLEMENTED, f"{self.path}: expected one request message, got none")

    async def _inflate(self, data: bytes) -> bytes:
        encoding = self.state.head.encoding
        if encoding not in ACCEPTED_ENCODINGS or encoding == "identity":
            raise GRPCError(Status.INTERNAL, f"request message is compressed, but grpc-encoding is {encoding!r}")
        data = await self._host.inflater.inflate(data, encoding)
        self._inflated = len(data)
        return data

    def _release_inflated(self) -> None:
        self._host.inflater.release(self._inflated)
        self._inflated = 0

    def _decode(self, data: bytes | memoryview) -> Any:
        if self.handler.request_type is memoryview or isinstance(data, memoryview):
            return data
        try:
            return self._host.codec.decode(data, self.handler.request_type)
        except GRPCError:
            raise
        except Exception as error:  # a codec may raise anything for invalid bytes
            raise self._host.failures.decode_failure(error, self.handler.request_type) from error

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message

    # -- Sending -------------------------------------------------------------------------------------------------------

    async def send_initial_metadata(self, *, metadata: MetadataLike | None = None) -> None:
        """Send the response headers with metadata.

        Raises:
            ProtocolError: the headers were already sent.
            StreamTerminatedError: the call has ended.
        """
        if self._headers_sent:
            raise ProtocolError("initial metadata was already sent")
        self._check_open()
        encoded = encode_metadata(metadata) if metadata else ()
        has_id = any(name == REQUEST_ID_HEADER for name, _ in encoded)
        block = (RESPONSE_HEADERS if has_id else self._response_headers()) + metadata_block(encoded)
        self._headers_sent = True
        self._host.core.send_headers(self.state, block)
        self._host.wake_writer()

    async def send_message(self, message: Any, *, has_more: bool = True) -> None:
        """Send one response message, after the response headers.

        Without ``has_more``, no other message of the call is ready, so that a write need not wait for more bytes.
        If the reply type is bytes, a memoryview or piecewise message is sent without a copy and must not change.
        Returns when the bytes are queued at the connection's writer.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED, the message exceeds the size limit.
            ProtocolError: second message of a unary response.
            StreamTerminatedError: the call has ended.
            trio.BusyResourceError: another task is sending, or a message was cancelled partway.

        Cancellation: waits for the flow-control window and the writer, and on response streams for the send budget. On
        response streams every sixteenth message is a checkpoint, so that messages share writes. After a message was
        cancelled partway no other can be sent.
        """
        self._check_open()
        streaming = self.handler.cardinality.server_streaming
        if self._replies and not streaming:
            raise ProtocolError(f"{self.path}: a unary response has one message")
        if streaming:
            await self._wait_for_budget()
        data = self._encode(message)
        if self._sending:
            raise trio.BusyResourceError("another message is being sent, or was cancelled partway")
        self._replies += 1
        self.sent += len(data)
        host, prefix = self._host, message_prefix(len(data))
        headers, self._headers_sent = b"" if self._headers_sent else self._response_headers(), True
        if has_more:
            host.wake_writer()
        most = host.limits.write_high_water_bytes
        if isinstance(data, PiecedMessage) or not host.core.send_answer(self.state, headers, prefix, data, most):
            if headers:
                host.core.send_headers(self.state, headers)
            host.wake_writer()
            self._sending = True
            await host.senders.send(self.state, prefix, data)
            self._check_open()
            self._sending = False
        elif not has_more and not host.write_alone():
            host.wake_writer()

    async def _wait_for_budget(self) -> None:
        if not self._replies % _MESSAGES_PER_CHECKPOINT:
            await trio.lowlevel.checkpoint()
        if self._host.share.is_full:
            await self._host.share.wait(0)
        self._check_open()

    def _encode(self, message: Any) -> bytes | memoryview | PiecedMessage:
        is_serialised = self.handler.reply_type is bytes and type(message) in _SERIALISED
        data = message if is_serialised else self._host.codec.encode(message, self.handler.reply_type)
        size, limit = len(data), self._host.limits.max_send_message_bytes
        if size > limit:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"response message of {size} bytes is larger than the limit of {limit} bytes (max_send_message_bytes)",
            )
        return data

    async def send_trailing_metadata(
        self,
        *,
        status: Status = Status.OK,
        status_message: str | None = None,
        status_details: bytes | None = None,
        metadata: MetadataLike | None = None,
    ) -> None:
        """Set status and trailing metadata, which are sent when the handler returns.

        With ``Status.OK`` and only metadata, messages may still be sent.

        Raises:
            ProtocolError: trailers were already set.
            StreamTerminatedError: the call has ended.
        """
        if self._trailing_status:
            raise ProtocolError("trailing metadata was already sent")
        self._check_open()
        self._handler_status = status.value
        self._trailing_status = trailers_block(status, status_message, status_details)
        if metadata:
            self._trailing_metadata = metadata_block(encode_metadata(metadata))

    def add_trailers(self, *pairs: tuple[str, str]) -> None:
        """Add trailers (name, value) to the status that is sent when the handler returns."""
        self._trailing_metadata += metadata_block(pairs)

    def _check_open(self) -> None:
        if self.state.is_local_closed:
            raise StreamTerminatedError(f"{self.path}: the call has ended")

    # -- Called by the connection --------------------------------------------------------------------------------------

    async def run(self, reusable_scope: ReusableScope | None = None) -> None:
        """Run the handler and send its status, in the reusable scope if given.

        Cancellation: cancelling ``scope`` ends in trailers; a cancellation from outside passes through.
        """
        current_request.set(self)
        self._request_id = RequestId(self.state.head.headers)
        current_request_id.set(self._request_id)
        observer = self._host.observer
        if observer is not None:
            is_sampled = observer.samples(self.state.head.traceparent)
            if is_sampled is not False or observer.needs_every or self.handler.cardinality.client_streaming:
                self._create_record(is_sampled=is_sampled)
        failure: GRPCError | None = None
        try:
            # A call that was reset before it started has no message, and its client expects no response.
            if not self.state.reset:
                if reusable_scope is None or self.failure is not None:
                    with self.scope:
                        await self._check_start()
                        await self.handler.func(self)
                else:
                    await self._run_in_reusable_scope(reusable_scope)
        except Exception as error:  # noqa: BLE001  # an error of one call must not affect other calls
            failure = self._host.failures.translate(error, self.path)
        finally:
            if self.arrival is not None and self.arrival.turns >= 0:
                self.arrival.settle()
            if self._inflated:
                self._release_inflated()
        try:
            self._end(failure)
        finally:
            # The traceback references this frame; the cycle would keep the request alive until garbage collection.
            del failure
            if observer is not None:
                self._notify_end(observer)
            self.event = None

    async def _check_start(self) -> None:
        scope, deadline = self.scope, self.deadline
        if deadline != math.inf and deadline <= trio.current_time():
            scope.cancel()
            await trio.lowlevel.checkpoint()
        if self.state.head.encoding != "identity":
            self._refuse_unknown_encoding()

    async def _run_in_reusable_scope(self, reusable_scope: ReusableScope) -> None:
        """Run the handler in the reusable scope, which is set up only when the handler needs it."""
        self._reusable_scope, self._scope = reusable_scope, None
        try:
            if self.deadline != math.inf or self.state.head.encoding != "identity":
                await self._check_start()
            await self.handler.func(self)
        except BaseException as error:
            if not reusable_scope.take_back(error):
                raise
        else:
            if reusable_scope.is_kept or self._scope is not None:
                reusable_scope.take_back(None)
        finally:
            self._reusable_scope = None

    def _create_record(self, *, is_sampled: bool | None) -> WireRequest:
        head = self.state.head
        record = self.record = WireRequest("gRPC", "POST", self.path, head.headers, self._host.peer)
        record.traceparent = head.traceparent
        record.is_stream = self.handler.cardinality.client_streaming
        record.is_sampled = None if record.is_stream else is_sampled
        return record

    def _notify_end(self, observer: RequestObserver) -> None:
        """Notify the observer, also of a failed call that it did not need before its end."""
        record, event = self.record, self.event
        if record is None:
            if event is None or (self._status == _OK and event.code == OK):
                return
            record = self._create_record(is_sampled=False)
        record.event = event
        record.received, record.sent, record.status = self.received, self.sent, self._status
        observer.request_ended(record)
        record.event = None

    def _response_headers(self) -> bytes:
        return RESPONSE_HEADERS + self._request_id_block()

    def _request_id_block(self) -> bytes:
        return b"" if self._request_id is None else encode_header(b"x-request-id", self._request_id.value.encode())

    def _end(self, failure: GRPCError | None) -> None:
        if self.state.is_local_closed:
            return
        scope = self._scope
        if scope is not None and (scope.cancelled_caught or (failure is not None and scope.cancel_called)):
            # An error raised while a cancelled handler unwinds did not end the call.
            failure = self.failure or GRPCError(Status.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        elif failure is None and not (
            self._replies or self._trailing_status or self.handler.cardinality.server_streaming
        ):
            failure = self._host.failures.missing_reply(self.path)
        self._finish(failure)

    def _refuse_unknown_encoding(self) -> None:
        encoding = self.state.head.encoding
        if encoding not in ACCEPTED_ENCODINGS:
            self._trailing_metadata = metadata_block([("grpc-accept-encoding", ",".join(ACCEPTED_ENCODINGS))])
            raise GRPCError(
                Status.UNIMPLEMENTED,
                f"grpc-encoding {encoding!r} is not supported, expected one of {', '.join(ACCEPTED_ENCODINGS)}",
            )

    def _finish(self, failure: GRPCError | None) -> None:
        core = self._host.core
        if failure is None:
            self._status = self._handler_status
            if not self._headers_sent:
                core.send_headers(self.state, self._response_headers())
            block = self._trailing_status or OK_TRAILERS
        else:
            self._status = failure.status.value
            details = failure.details if isinstance(failure.details, bytes) else None
            encode = trailers_block if self._headers_sent else trailers_only_block
            block = encode(failure.status, failure.message, details)
            if not self._headers_sent:
                block += self._request_id_block()
            if isinstance(failure, ErrorWithTrailers):
                block += failure.trailers()
        core.send_headers(self.state, block + self._trailing_metadata, end_stream=True)
        self._host.wake_writer()

    def on_data(self) -> None:
        """Wake a waiting receiver, unless its message is still incomplete."""
        if self._has_order and self.arrival is None and self.state.buffer.completion_number:
            self.arrival = self._host.arrivals.note(self.state.buffer.completion_number)
        if self._readable is None or not self._readable.waiting:
            return
        if self.state.buffer.size < self.state.buffer.wanted and not self.state.is_remote_closed:
            self._host.core.consume(self.state, self.state.uncredited)
        else:
            self._readable.wake()


# -- Errors of handlers ------------------------------------------------------------------------------------------------


class FailureTranslator:
    """Translator of handler exceptions to gRPC errors; ``map_error`` maps errors of the application."""

    __slots__ = ("_map_error",)

    def __init__(self, map_error: ErrorMapper | None = None) -> None:
        self._map_error = map_error

    def translate(self, error: Exception, path: str) -> GRPCError:
        """Return the gRPC error for a handler's exception; unexpected exceptions are logged and become INTERNAL."""
        error = single_error(error)
        known = self._known_error(error)
        if known is not None:
            return known
        if isinstance(error, StreamTerminatedError):
            return GRPCError(Status.CANCELLED, text_of(error))
        log.error("rpc handler failed", path=path, error=f"{type(error).__name__}: {text_of(error)}", exc_info=error)
        return GRPCError(Status.INTERNAL, f"{path}: the server failed on this call ({type(error).__name__})")

    def decode_failure(self, error: Exception, message_type: type) -> GRPCError:
        """Return the gRPC error for a message that the codec could not decode."""
        known = self._known_error(error)
        if known is not None:
            return known
        return GRPCError(
            Status.INVALID_ARGUMENT,
            f"request is not a valid {message_type.__name__}: {type(error).__name__}: {text_of(error)}",
        )

    def missing_reply(self, path: str) -> GRPCError:
        """Return the gRPC error for a unary handler that returned without a reply."""
        log.error("rpc handler sent no reply", path=path)
        return GRPCError(Status.INTERNAL, f"{path}: the server sent no reply")

    def _known_error(self, error: Exception) -> GRPCError | None:
        if isinstance(error, GRPCError):
            return error
        return self._map_error(error) if self._map_error is not None else None


# -- Decompression -----------------------------------------------------------------------------------------------------

_SIZE_BYTES: Final = 4
_INLINE_BYTES: Final = 64 * 1024
"""Size up to which messages are decompressed on the event loop; larger ones in a thread."""


class Inflater:
    """Decompressor of one connection; ``max_bytes`` limits each message and all decompressed messages in use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_use = ByteBudget(max_bytes)
        self._thread_lock: trio.Lock | None = None

    async def inflate(self, data: bytes, encoding: str = "gzip") -> bytes:
        """Decompress a ``gzip`` or ``deflate`` (zlib format) message, which counts as in use until :meth:`release`.

        Raises ``GRPCError``: RESOURCE_EXHAUSTED if the result is too large, INVALID_ARGUMENT if the data is malformed.
        """
        try:
            return await self._inflate(data, encoding)
        except InflationTooLargeError:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"request message is larger than the limit of {self._max_bytes} bytes (max_receive_message_bytes)"
                " after decompression",
            ) from None
        except InflationError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"request message is not valid {encoding}: {error}") from None

    async def _inflate(self, data: bytes, encoding: str) -> bytes:
        is_gzip = encoding == "gzip"
        inflation = Inflation(data, GZIP_BITS if is_gzip else DEFLATE_BITS, self._max_bytes)
        # gzip ends with the decompressed size; zlib does not have it.
        announced = int.from_bytes(data[-_SIZE_BYTES:], "little") if is_gzip else _INLINE_BYTES
        size = min(announced, self._max_bytes)
        if size > _INLINE_BYTES or not self._in_use.take(size):
            return await self._inflate_in_thread(inflation, size)
        try:
            if inflation.go_on(_INLINE_BYTES):
                message = inflation.finish()
                self._in_use.release(size - len(message))
                return message
        except InflationError:
            self._in_use.release(size)
            raise
        self._in_use.release(size)
        return await self._inflate_in_thread(inflation, self._max_bytes)

    async def _inflate_in_thread(self, inflation: Inflation, size: int) -> bytes:
        if self._thread_lock is None:
            self._thread_lock = trio.Lock()
        async with self._thread_lock:
            await self._in_use.wait(size)
            try:
                message = await in_inflating_thread(inflation.finish)
            except BaseException:
                self._in_use.release(size)
                raise
            self._in_use.release(size - len(message))
            return message

    def release(self, size: int) -> None:
        """Release the size of a message that is no longer in use."""
        self._in_use.release(size)
