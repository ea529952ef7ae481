"""One call as its handler sees it: grpclib's ``Stream`` surface on trio."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio
from grpclib.const import Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.metadata import encode_metadata
from multidict import MultiDict

from ovmstrio.core.connection import ClientAddress, Peer
from ovmstrio.core.events import OK, WireRequest, current_request, keep_body, kept_body_bytes
from ovmstrio.transport.grpc.core import Http2Core, StreamState
from ovmstrio.transport.grpc.headers import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    TrailedError,
    Wakeup,
    metadata_block,
    trailers_block,
    trailers_only_block,
)
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.messages import ACCEPTED_ENCODINGS, message_prefix
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from ovmstrio.core.events import CallEvent, RequestObserver
    from ovmstrio.core.request import Arrival, Arrivals
    from ovmstrio.telemetry.log_rate_limit import RepeatedFaults
    from ovmstrio.transport.grpc.connection import LentScope, Senders
    from ovmstrio.transport.grpc.headers import FailureTranslator
    from ovmstrio.transport.grpc.messages import Inflater
    from ovmstrio.transport.send_budget import PendingShare

__all__ = ["Call", "CallHost", "Metadata", "OrderedHandler", "Peer", "current_call"]

MetadataValue = str | bytes
Metadata = MultiDict[MetadataValue]
MetadataLike = Mapping[str, MetadataValue] | Collection[tuple[str, MetadataValue]]

_HIDDEN_HEADERS: Final = frozenset({"te", "content-type", "user-agent"})
_MESSAGES_PER_CHECKPOINT: Final = 16
"""Messages that a call may send before others get their turn."""
_SERIALISED: Final = (bytes, memoryview, PiecedMessage)
_OK: Final[int] = Status.OK.value


def current_call() -> Call:
    """Give the call that the running task serves.

    Raises:
        LookupError: the task does not descend from a call.
    """
    found = current_request.get()
    if isinstance(found, Call):
        return found
    raise LookupError("no call of gRPC's is served here")


class OrderedHandler(Handler):
    """A handler of unary requests whose order may matter: its calls have an ``arrival``, which they should name."""

    __slots__ = ()


class CallHost(Protocol):
    """What a call needs of its connection."""

    arrivals: Arrivals
    core: Http2Core
    codec: CodecBase
    limits: TransportLimits
    failures: FailureTranslator
    faults: RepeatedFaults
    inflater: Inflater
    observer: RequestObserver | None
    peer: Peer
    senders: Senders
    share: PendingShare

    @property
    def mark_dirty(self) -> Callable[[], None]:
        """What lets the writer send what waits in the core."""


class Call:
    """One RPC. Handlers get it as grpclib's ``Stream``; service methods find it with ``current_call()``.

    Ownership: the connection creates, runs and releases it. A handler must not keep it after it returned.
    Cancellation: ``scope`` is cancelled when the client resets the stream, goes away or its deadline passes, and when
    the server stops.

    Attributes:
        path: ``/package.Service/Method``.
        peer: the other end.
        arrival: when the message of a unary request was whole, if its handler is one of :class:`OrderedHandler`.
        deadline: trio clock time of the caller's deadline; ``math.inf`` without one.
        handler: what answers; it may put another one in its place before anything is received.
        received: bytes of the messages that were received.
        sent: bytes of the messages that were sent.
        event: the last call that it became; None before, and once it has ended.
        told: the request as observers are told of it; None where none of them has to know of it before its end.
    """

    __slots__ = (
        "_has_order",
        "_headers_sent",
        "_host",
        "_inflated",
        "_lent",
        "_readable",
        "_replies",
        "_requests",
        "_said_status",
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
        "sent",
        "state",
        "told",
    )

    def __init__(self, host: CallHost, state: StreamState, handler: Handler) -> None:
        head = state.head
        self._host = host
        self.state = state
        self.handler = handler
        self.arrival: Arrival | None = None
        self._has_order = isinstance(handler, OrderedHandler)
        self.path = head.path
        self.received = self.sent = 0
        self.deadline = math.inf
        if head.timeout_seconds != math.inf:
            self.deadline = trio.current_time() + head.timeout_seconds
        self._scope: trio.CancelScope | None = None
        self._lent: LentScope | None = None
        self.failure: GRPCError | None = None
        self.event: CallEvent | None = None
        self.told: WireRequest | None = None
        self._readable: Wakeup | None = None
        self._requests = 0
        self._inflated = 0
        self._replies = 0
        self._headers_sent = False
        self._sending = False
        self._trailing_metadata = b""
        self._trailing_status = b""
        self._said_status = _OK
        self._status = -1

    # -- about the call ------------------------------------------------------------------------------------------

    @property
    def scope(self) -> trio.CancelScope:
        """Give the cancel scope around the handler, which may be another one before it runs."""
        if self._scope is None:
            self._scope = self._lent.lend(self.deadline) if self._lent else trio.CancelScope(deadline=self.deadline)
        return self._scope

    @property
    def peer(self) -> Peer:
        """The other end of the connection."""
        return self._host.peer

    @property
    def client(self) -> ClientAddress:
        """The address of the client, derived from the peer and the metadata of proxies."""
        return self._host.peer.client(self.state.head.headers)

    @property
    def client_endpoint(self) -> str:
        """The client as text: ``host:port``, ``[host]:port``, ``unix:`` or ``unknown``."""
        return self.client.endpoint

    @property
    def metadata(self) -> Metadata:
        """Decode the client's metadata; ``-bin`` values are bytes.

        Raises:
            GRPCError: INVALID_ARGUMENT, a ``-bin`` value is not base64.
        """
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
        """Give the client's ``user-agent``, empty when it sent none."""
        return next((value for key, value in self.state.head.headers if key == "user-agent"), "")

    @property
    def half_closed(self) -> bool:
        """Whether the client has sent its last message, read here or not."""
        return self.state.remote_closed

    def cancel(self, failure: GRPCError | None = None) -> None:
        """Cancel the handler; the client gets ``failure``, CANCELLED when none is given.

        The first reason stays.
        """
        if self.failure is None:
            self.failure = failure or GRPCError(Status.CANCELLED, "the call was cancelled by the server")
        self.scope.cancel()

    def forsake(self) -> None:
        """Cancel the handler, whose client is gone: nothing is said to it any more."""
        self.state.local_closed = self.state.remote_closed = True
        self.cancel()

    # -- receiving -----------------------------------------------------------------------------------------------

    async def recv_message(self, *, is_decoded: bool = True) -> Any:
        """Receive the next request message; ``None`` when the client has sent its last.

        One that is not to be decoded yet is given as bytes, which :meth:`decode` reads.  Of a method whose requests are
        ``memoryview`` a large message is one, whose end is aligned in memory, and a small one is bytes.

        Raises:
            GRPCError: the message is too large, cut off, compressed in an unknown way or cannot be decoded, or a
                unary request does not hold exactly one message.
            trio.BusyResourceError: another task is receiving already.

        Cancellation: a checkpoint for streams of requests; for a unary request only while its message is incomplete.
        """
        if self._inflated:
            # Who asks for the next message is done with the last one.
            self._release_inflated()
        if self.handler.cardinality.client_streaming:
            await trio.lowlevel.checkpoint()
        buffer, limit = self.state.buffer, self._host.limits.max_receive_message_bytes
        take = buffer.take_aligned if self.handler.request_type is memoryview else buffer.take
        try:
            taken = take(limit)
            while taken is None:
                if self.state.remote_closed:
                    return self._end_of_requests()
                await self._wait_readable()
                taken = take(limit)
            flag, data = taken
            self._credit_taken()
            if flag:
                data = await self._inflate(bytes(data))
            self.received += len(data)
            if most := kept_body_bytes.get():
                keep_body(data, most)
            return self._decode(data) if is_decoded else data
        except GRPCError as error:
            self._tell_fault(error)
            raise

    def decode(self, data: bytes | memoryview) -> Any:
        """Read a message that was received without being decoded.

        Raises:
            GRPCError: it cannot be decoded.
        """
        try:
            return self._decode(data)
        except GRPCError as error:
            self._tell_fault(error)
            raise

    def _tell_fault(self, error: GRPCError) -> None:
        self._host.faults.tell(
            "request cannot be read",
            peer=self.peer.address.endpoint,
            kind=error.status.name,
            path=self.path,
            status=error.status.name,
            reason=error.message,
        )

    async def _wait_readable(self) -> None:
        if self.state.uncredited:
            # A reader that waits has room for all of its message, else halves of messages fill the window.
            self._host.core.consume(self.state, self.state.uncredited)
            self._host.mark_dirty()
        if self._readable is None:
            self._readable = Wakeup()
        await self._readable.wait()

    def _credit_taken(self) -> None:
        state = self.state
        self._requests += 1
        if state.uncredited > state.buffer.size:
            self._host.core.consume(state, state.uncredited - state.buffer.size)
            self._host.mark_dirty()
        if state.buffer.size and not self.handler.cardinality.client_streaming:
            raise GRPCError(Status.UNIMPLEMENTED, f"{self.path}: expected one request message, got more")

    def _end_of_requests(self) -> None:
        if self.state.buffer.size:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{self.path}: the request ends within a message")
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
        except Exception as error:  # a codec may raise what it likes about a peer's bytes
            raise self._host.failures.undecodable(error, self.handler.request_type) from error

    def __aiter__(self) -> Call:
        """Iterate over the request messages."""
        return self

    async def __anext__(self) -> Any:
        """Receive the next request message, as ``recv_message``."""
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message

    # -- sending -------------------------------------------------------------------------------------------------

    async def send_initial_metadata(self, *, metadata: MetadataLike | None = None) -> None:
        """Send the response headers now, with the given metadata.

        Raises:
            ProtocolError: they were sent before.
            StreamTerminatedError: the call is over.
        """
        if self._headers_sent:
            raise ProtocolError("initial metadata was already sent")
        self._check_open()
        block = RESPONSE_HEADERS
        if metadata:
            block += metadata_block(encode_metadata(metadata))
        self._headers_sent = True
        self._host.core.send_headers(self.state, block)
        self._host.mark_dirty()

    async def send_message(self, message: Any) -> None:
        """Send one response message; the response headers first, if they are not out yet.

        Of a method whose messages are bytes a view is sent as it is, and one in pieces from where these lie; nothing
        may change them any more.

        Returns when the bytes are handed to the connection's writer, not when they have arrived.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED, the message is larger than the server sends.
            ProtocolError: a second message of a unary response.
            StreamTerminatedError: the call is over.
            trio.BusyResourceError: another task is sending, or a message was cancelled half-way.

        Cancellation: waits for the client's flow-control window and for the writer, and with one of many messages for
        room among the answers that are pending. The first message of a stream of
        responses and then every sixteenth is a checkpoint, so that those between share a write. After a message that
        was cancelled half-way no other can be sent.
        """
        self._check_open()
        streaming = self.handler.cardinality.server_streaming
        if self._replies and not streaming:
            raise ProtocolError(f"{self.path}: a unary response has one message")
        if streaming:
            await self._wait_as_stream()
        data = self._encode(message)
        if self._sending:
            raise trio.BusyResourceError("another message is being sent, or was cut short")
        self._replies += 1
        self.sent += len(data)
        host, prefix = self._host, message_prefix(len(data))
        headers, self._headers_sent = b"" if self._headers_sent else RESPONSE_HEADERS, True
        host.mark_dirty()
        most = host.limits.write_high_water_bytes
        if isinstance(data, PiecedMessage) or not host.core.send_answer(self.state, headers, prefix, data, most):
            if headers:
                host.core.send_headers(self.state, headers)
            self._sending = True
            await host.senders.send(self.state, prefix, data)
            self._check_open()
            self._sending = False

    async def _wait_as_stream(self) -> None:
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
        """Fix the call's status and trailing metadata; they go out when the handler returns.

        With ``Status.OK`` and nothing else but metadata, messages may still be sent.

        Raises:
            ProtocolError: trailers were given before.
            StreamTerminatedError: the call is over.
        """
        if self._trailing_status:
            raise ProtocolError("trailing metadata was already sent")
        self._check_open()
        self._said_status = status.value
        self._trailing_status = trailers_block(status, status_message, status_details)
        if metadata:
            self._trailing_metadata = metadata_block(encode_metadata(metadata))

    def _check_open(self) -> None:
        if self.state.local_closed:
            raise StreamTerminatedError(f"{self.path}: the call is over")

    # -- the connection's side -----------------------------------------------------------------------------------

    async def run(self, lent: LentScope | None = None) -> None:
        """Run the handler and answer the client, whatever happens; in the scope that is lent, or one of its own.

        Cancellation: ``scope`` ends in trailers; a cancellation from outside passes through.
        """
        current_request.set(self)
        observer = self._host.observer
        if observer is not None:
            is_sampled = observer.samples(self.state.head.traceparent)
            if is_sampled is not False or observer.needs_every or self.handler.cardinality.client_streaming:
                self._begin_told(is_sampled=is_sampled)
        failure: GRPCError | None = None
        try:
            # One that is reset before it began has no message any more, and nobody whom an answer would reach.
            if not self.state.reset:
                if lent is None or self.failure is not None:
                    with self.scope:
                        await self._check_begin()
                        await self.handler.func(self)
                else:
                    await self._handle_in(lent)
        except Exception as error:  # noqa: BLE001  # the border of one call: no other call may suffer
            failure = self._host.failures.translate(error, self.path)
        finally:
            if self.arrival is not None and self.arrival.turns >= 0:
                self.arrival.settle()
            if self._inflated:
                self._release_inflated()
        try:
            self._end(failure)
        finally:
            # Its traceback knows this frame: both would keep what the call was given until cycles are looked for.
            del failure
            if observer is not None:
                self._tell_end(observer)
            self.event = None

    async def _check_begin(self) -> None:
        """Refuse a call that is too late, or whose messages nobody here could read."""
        scope, deadline = self.scope, self.deadline
        if deadline != math.inf and deadline <= trio.current_time():
            scope.cancel()
            await trio.lowlevel.checkpoint()
        if self.state.head.encoding != "identity":
            self._refuse_unknown_encoding()

    async def _handle_in(self, lent: LentScope) -> None:
        """Run the handler in a scope that is taken only by who needs it: most calls end before anybody does."""
        self._lent, self._scope = lent, None
        try:
            if self.deadline != math.inf or self.state.head.encoding != "identity":
                await self._check_begin()
            await self.handler.func(self)
        except BaseException as error:
            if not lent.take_back(error):
                raise
        else:
            if lent.is_kept or self._scope is not None:
                lent.take_back(None)
        finally:
            self._lent = None

    def _begin_told(self, *, is_sampled: bool | None) -> WireRequest:
        """Make the request that observers are told of."""
        head = self.state.head
        told = self.told = WireRequest("gRPC", "POST", self.path, head.headers, self._host.peer)
        told.traceparent = head.traceparent
        told.is_stream = self.handler.cardinality.client_streaming
        told.is_sampled = None if told.is_stream else is_sampled
        return told

    def _tell_end(self, observer: RequestObserver) -> None:
        """Tell of the end, also of what nobody had to know of before it has failed."""
        told, event = self.told, self.event
        if told is None:
            if event is None or (self._status == _OK and event.code == OK):
                return
            told = self._begin_told(is_sampled=False)
        told.event = event
        told.received, told.sent, told.status = self.received, self.sent, self._status
        observer.request_ended(told)
        told.event = None

    def _end(self, failure: GRPCError | None) -> None:
        """Say how the call ended, if nothing has been said yet."""
        if self.state.local_closed:
            return
        scope = self._scope
        if scope is not None and (scope.cancelled_caught or (failure is not None and scope.cancel_called)):
            # An error on the way out of a cancelled handler is not what ended the call.
            failure = self.failure or GRPCError(Status.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        elif failure is None and not (
            self._replies or self._trailing_status or self.handler.cardinality.server_streaming
        ):
            failure = self._host.failures.no_reply(self.path)
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
            self._status = self._said_status
            if not self._headers_sent:
                core.send_headers(self.state, RESPONSE_HEADERS)
            block = self._trailing_status or OK_TRAILERS
        else:
            self._status = failure.status.value
            details = failure.details if isinstance(failure.details, bytes) else None
            encode = trailers_block if self._headers_sent else trailers_only_block
            block = encode(failure.status, failure.message, details)
            if isinstance(failure, TrailedError):
                block += failure.trailers()
        core.send_headers(self.state, block + self._trailing_metadata, end_stream=True)
        self._host.mark_dirty()

    def data_arrived(self) -> None:
        """Let a waiting receiver go on, unless its message is still incomplete."""
        if self._has_order and self.arrival is None and self.state.buffer.whole_at:
            self.arrival = self._host.arrivals.note(self.state.buffer.whole_at)
        if self._readable is None or not self._readable.waiting:
            return
        if self.state.buffer.size < self.state.buffer.wanted and not self.state.remote_closed:
            self._host.core.consume(self.state, self.state.uncredited)
        else:
            self._readable.wake()
