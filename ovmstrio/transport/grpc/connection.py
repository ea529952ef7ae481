"""The trio shell around one HTTP/2 connection: one reader, one writer, one task a call that waits.

The reader answers requests that it has read whole, one after the other, and sends their answers together.  When one has
to wait, the task is that call's from then on, and another one reads: a call that never waits has no task.

The writer sleeps until something is marked dirty and then sends all there is, so the answers of many calls share one
system call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

import structlog
import trio
from grpclib.const import Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from ovmstrio.core.connection import Peer
from ovmstrio.core.events import RequestObserver
from ovmstrio.core.request import Arrivals, Buffer
from ovmstrio.telemetry.log_rate_limit import RepeatedFaults
from ovmstrio.telemetry.loop_load import current_loop_load
from ovmstrio.transport.accepting import Pace
from ovmstrio.transport.direct_stream import DirectStream, close_now, told_of_waiting, transport_of
from ovmstrio.transport.grpc.core import (
    DataReceived,
    Event,
    Http2Core,
    PeerLeaving,
    PingAcknowledged,
    RequestStarted,
    StreamReset,
    WindowOpened,
)
from ovmstrio.transport.grpc.frames import ConnectionFault, ErrorCode
from ovmstrio.transport.grpc.headers import FailureTranslator, Wakeup, trailers_only_block
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.messages import Inflater
from ovmstrio.transport.grpc.stream import Call
from ovmstrio.transport.send_budget import PendingShare, current_share
from ovmstrio.transport.stall_detector import Standstill, unsent_bytes
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType
    from typing import Self

    from ovmstrio.transport.grpc.core import StreamState

__all__ = ["NO_ROUTES", "Connection", "Endings", "LentScope", "Routes", "Senders", "StallWatch", "close_stream"]

# ----------------------------------------------------------------------
# Messages that cannot be sent at once: who waits on one connection, for what, and who goes on first
# ----------------------------------------------------------------------

_FEW: Final = 64
"""Entries of the heap that may be out of date whatever the number of those that are not."""


class _Message:
    """A message that is on its way: whose it is, how much is left, and for how long that has been the same."""

    __slots__ = ("left", "standstill", "stream")

    def __init__(self, stream: StreamState, size: int) -> None:
        self.stream = stream
        self.left = size
        self.standstill = Standstill(trio.current_time())


class Senders:
    """The senders of one connection that wait.

    Args:
        core: the connection's state.
        share: counts the bytes of their messages.
        high_water_bytes: of answers that may wait for the socket.
        mark_dirty: lets the writer send what waits in the core.

    Attributes:
        counted: bytes that wait in the core and are in the share still; whoever takes them says so.
    """

    def __init__(
        self, core: Http2Core, share: PendingShare, high_water_bytes: int, mark_dirty: Callable[[], None]
    ) -> None:
        self.counted = 0
        self._core = core
        self._share = share
        self._messages: dict[int, _Message] = {}
        self._high_water_bytes = high_water_bytes
        self._mark_dirty = mark_dirty
        self._queue = trio.lowlevel.ParkingLot()
        self._starved: dict[int, tuple[StreamState, Wakeup]] = {}
        self._by_credit: list[tuple[int, int]] = []

    async def send(self, stream: StreamState, prefix: bytes, message: bytes | memoryview | PiecedMessage) -> bool:
        """Send a message in pieces, as windows and the writer allow; False if the stream ended before.

        Cancellation: while it waits; a part of the message may have been sent.
        """
        pieces = iter(message.pieces if isinstance(message, PiecedMessage) else ((b"", memoryview(message)),))
        rest = memoryview(b"")
        left = len(prefix) + len(message)
        waiting = self._messages[stream.stream_id] = _Message(stream, left)
        self._share.add(left)
        try:
            while left:
                await self._turn(stream)
                if stream.local_closed:
                    return False
                while left and self._is_open() and (room := self._core.sendable(stream)) > 0:
                    if not rest:
                        before, rest = next(pieces, (b"", rest))
                        prefix += before
                    start, data = prefix[:room], rest[: max(0, room - len(prefix))]
                    self._core.send_data(stream, start, data)
                    prefix, rest = prefix[room:], rest[len(data) :]
                    left -= len(start) + len(data)
                self.counted += waiting.left - left
                waiting.left = left
                self._mark_dirty()
        finally:
            del self._messages[stream.stream_id]
            self._share.give_back(waiting.left)
            self.let_next()
        return True

    def stalled(self, now: float, patience_seconds: float) -> list[StreamState]:
        """Tell of which streams nothing has been sent for so long."""
        return [
            each.stream
            for each in self._messages.values()
            if each.standstill.seconds(each.left, now) >= patience_seconds
        ]

    def __len__(self) -> int:
        """Count the messages that wait."""
        return len(self._messages)

    def let_next(self) -> None:
        """Let the next sender go on that can, of the queue and of those whose own window was in the way."""
        if not self._is_open():
            return
        if self._queue:
            self._queue.unpark()
        # Those whose streams were granted most come first, whatever the peer's INITIAL_WINDOW_SIZE is.
        heap, initial = self._by_credit, self._core.windows.initial
        while heap and heap[0][0] < initial:
            _, stream_id = heappop(heap)
            if self.wake(stream_id):
                return

    def wake(self, stream_id: int) -> bool:
        """Let the sender of one stream go on, whose window has opened; False if none waits for it."""
        starved = self._starved.pop(stream_id, None)
        if starved is None:
            return False
        starved[0].is_starved = False
        starved[1].wake()
        return True

    def _is_open(self) -> bool:
        return self._core.windows.connection > 0 and self._core.waiting_bytes < self._high_water_bytes

    async def _turn(self, stream: StreamState) -> None:
        """Wait until bytes of a stream may be sent, or it is over."""
        windows = self._core.windows
        while not stream.local_closed:
            if windows.of(stream) <= 0:
                await self._wait_for_window(stream)
            elif not self._is_open():
                await self._queue.park()
            else:
                return

    async def _wait_for_window(self, stream: StreamState) -> None:
        self.let_next()
        wakeup = Wakeup()
        self._starved[stream.stream_id] = stream, wakeup
        stream.is_starved = True
        if len(self._by_credit) > 2 * len(self._starved) + _FEW:
            self._by_credit = [(-each.credit, number) for number, (each, _) in self._starved.items()]
            heapify(self._by_credit)
        else:
            heappush(self._by_credit, (-stream.credit, stream.stream_id))
        try:
            await wakeup.wait()
        finally:
            stream.is_starved = False
            self._starved.pop(stream.stream_id, None)


# ----------------------------------------------------------------------
# Peers that leave answers where they are: which streams, or whether all of a connection
# ----------------------------------------------------------------------


class StallWatch:
    """Looks from time to time whether the peer of a connection takes any of what waits for it.

    Streams on which nothing waits are not stalled, however long they are idle.

    Attributes:
        is_writing: whether bytes are being handed to the socket.
        written: how many have been.
    """

    def __init__(self, core: Http2Core, senders: Senders, stream: trio.abc.Stream) -> None:
        self._core = core
        self._senders = senders
        self._stream = stream
        now = trio.current_time()
        self._socket = Standstill(now)
        self._window = Standstill(now)
        self.is_writing = False
        self.written = 0

    def look(self, now: float, patience_seconds: float) -> list[StreamState] | None:
        """Tell of the streams whose windows the peer has kept closed for too long; None if it takes nothing at all."""
        # A write that blocks and one that has come since look alike, but for what the socket holds.
        sent = (self.written, unsent_bytes(self._stream)) if self.is_writing else now
        if self._socket.seconds(sent, now) >= patience_seconds:
            return None
        windows, stalled = self._core.windows, self._senders.stalled(now, patience_seconds)
        stood = self._window.seconds(windows.connection if self._senders else now, now)
        if stalled and len(stalled) == len(self._senders) and stood >= patience_seconds:
            return None
        return [stream for stream in stalled if windows.of(stream) <= 0]


# ----------------------------------------------------------------------
# The calls of connections that end: they are cancelled a few at a time, so that the calls of others come between
# ----------------------------------------------------------------------

_CALLS_AT_ONCE: Final = 32
_PASSES: Final = 2
"""In the first the calls are told, and in the second most of them have ended, and their memory has been let go."""


class Endings:
    """Cancels the calls of connections that end, one connection after the other.

    Attributes:
        pace: of the connections' own ends.
    """

    __slots__ = ("_turn", "pace")

    def __init__(self) -> None:
        self.pace = Pace()
        self._turn: trio.Lock | None = None

    async def cancel(self, calls: Collection[Call]) -> None:
        """Cancel calls whose client is gone; some may not have ended when this returns.

        Cancellation: at any time; the rest of the calls is the caller's to cancel.
        """
        if not calls:
            return
        if self._turn is None:
            self._turn = trio.Lock()
        left = list(calls)
        async with self._turn:
            while left:
                for call in left[-_CALLS_AT_ONCE:]:
                    call.forsake()
                del left[-_CALLS_AT_ONCE:]
                for _ in range(_PASSES):
                    await trio.lowlevel.checkpoint()


# ----------------------------------------------------------------------
# One cancel scope for all calls that a task answers without waiting: to make and enter one costs a tenth of a call
# ----------------------------------------------------------------------


class LentScope:
    """A cancel scope that a task has entered before its calls, and lends to one of them after the other.

    A call that never waits cannot be cancelled meanwhile, and gives the scope back as it was.  The first one that
    waits keeps it, and the task with it: it leaves the scope when it ends.

    Between calls the scope is the task's own, which ends when it is cancelled.

    Ownership: of the scope, until the ``with`` block ends or the call that keeps it.

    Attributes:
        scope: what is lent.
        is_kept: whether the call that has it waits, or has waited.
    """

    __slots__ = ("_has_deadline", "_is_left", "is_kept", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_kept = self._is_left = self._has_deadline = False

    def __enter__(self) -> Self:
        self.scope.__enter__()
        return self

    def lend(self, deadline: float) -> trio.CancelScope:
        """Give the scope to a call with this deadline, in trio's time; ``math.inf`` for none."""
        if deadline != math.inf:
            self._has_deadline, self.scope.deadline = True, deadline
        return self.scope

    def take_back(self, error: BaseException | None) -> bool:
        """Have it back from a call that ended with this error, if with any; tells whether the scope has caught that."""
        scope = self.scope
        if self.is_kept:
            self._is_left = True
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
        return False if self._is_left else self.scope.__exit__(kind, error, traceback)


# ----------------------------------------------------------------------
# The trio shell around one HTTP/2 connection: one reader, one writer, one task a call that waits
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_KEEPALIVE_PING = b"alive?\0\0"
_DRAIN_PING = b"drain\0\0\0"
_ANNOUNCEMENT_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 1.0
_READ_BYTES: Final = 64 * 1024
_LARGE_READ_BYTES: Final = 512 * 1024


class Routes(Protocol):
    """Handlers that come and go."""

    def get(self, path: str, /) -> Handler | None:
        """Give the handler of a path now; it may put another one in its place before it receives anything."""
        ...


NO_ROUTES: Final[Routes] = MappingProxyType[str, Handler]({})


class Connection:
    """One peer.

    Ownership: ``run`` owns the stream, the writer and every call of the connection, and outlives none of them.

    Attributes:
        arrivals: the order of unary requests that are whole.
        calls: the calls whose handlers run, by stream.
        faults: of peers, for the log.
        inflater: decompresses messages.
        observer: is told of every call; None for nobody.
        senders: messages that wait for the peer.
        share: counts what waits for the peer.
        closed: set when ``run`` has ended.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        routes: Mapping[str, Handler],
        codec: CodecBase,
        *,
        further: Routes = NO_ROUTES,
        limits: TransportLimits,
        failures: FailureTranslator,
        faults: RepeatedFaults,
        endings: Endings,
        share: PendingShare,
        peer: Peer,
        observer: RequestObserver | None = None,
    ) -> None:
        self.observer = observer
        self.arrivals = Arrivals()
        self.core = Http2Core(limits, trio.current_time)
        self.codec = codec
        self.limits = limits
        self.failures = failures
        self.peer = peer
        self.calls: dict[int, Call] = {}
        self.faults = faults
        self._endings = endings
        self._stream = stream
        self._routes = routes
        self._further = further
        self._read_bytes = _READ_BYTES
        self._read_to_end = trio.Event()
        self._stops_reading = False
        self._fresh: list[Call] = []
        self._whole: deque[Call] = deque()
        self._lent = LentScope()
        self._loop = current_loop_load()
        self._is_answering = False
        self._is_flushing = False
        self._unsent = Wakeup()
        self.share = share
        self.inflater = Inflater(limits.max_receive_message_bytes)
        self.senders = Senders(self.core, share, limits.write_high_water_bytes, self.mark_dirty)
        self._stall = StallWatch(self.core, self.senders, stream)
        self._closing = False
        self._broken = False
        self._is_faulty = False
        self._has_left = False
        self._opened_at = self._heard_at = trio.current_time()
        self._pinged_at = math.inf
        self._drain_announced = False
        self._too_old = False
        self._written = trio.Event()
        self._last_stream_named = trio.Event()
        self.closed = trio.Event()

    # -- tasks ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the peer until it goes, breaks the protocol or has been drained.

        Raises:
            ExceptionGroup: of ``OSError`` and the like when the stream fails below HTTP/2.

        Cancellation: ends all calls at once, without a word to the peer. The stream is closed in any case.
        """
        current_share.set(self.share)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write)
                nursery.start_soon(self._read)
                await self._read_to_end.wait()
                if (self._is_faulty or not self._broken) and not self._has_nothing_left:
                    self._closing = True
                    self._unsent.wake()
                    with trio.move_on_after(self.limits.flush_seconds):
                        await self._written.wait()
                        if not self._is_faulty:
                            await self._linger()
                await self._endings.pace.turn()
                await self._endings.cancel(self.calls.values())
                nursery.cancel_scope.cancel()
                # Before the calls have unwound, because a handler in a thread may take its time.
                await close_stream(self._stream)
        finally:
            self.share.close()
            self.closed.set()

    async def _read(self) -> None:
        """Feed the core and answer, until there is no more to read, or another task has taken that over."""
        core, lent, receive_some = self.core, self._lent, self._stream.receive_some
        try:
            with lent:
                while lent is self._lent and not self._stops_reading:
                    if core.more:
                        await trio.lowlevel.checkpoint()
                        self._handle(core.go_on())
                    elif data := await receive_some(self._read_bytes):
                        # A full read says that more is waiting: a large message then takes few reads.
                        self._read_bytes = _READ_BYTES if len(data) < self._read_bytes else _LARGE_READ_BYTES
                        self._heard_at = trio.current_time()
                        self._handle(core.receive(data))
                        # A call that waits has this task, and would keep what was read for as long.
                        del data
                    else:
                        self._has_left = True
                        break
                    if self._whole:
                        await self._answer_whole()
        except ConnectionFault as fault:
            self._start_whole()
            self.faults.tell(
                "connection fault", peer=self.peer.address.endpoint, kind=fault.code.name, fault=str(fault)
            )
            core.fail(fault)
            self._is_faulty = True
            self.mark_dirty()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._broken = True
        if lent is self._lent:
            self._read_to_end.set()

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            self._dispatch[type(event)](self, event)
        for call in self._fresh:
            if call.state.remote_closed:
                self._whole.append(call)
            else:
                self._nursery.start_soon(self._serve, call, name=call.path)
        self._fresh.clear()
        self._end_if_drained()
        if self.core.waiting_bytes:
            self._check_backlog()
            self.mark_dirty()

    async def _answer_whole(self) -> None:
        """Answer requests that have come whole, as long as none of them waits, and send the answers together."""
        lent = self._lent
        self._is_answering, has_answered = True, False
        while self._whole:
            # One in each turn at least, lest those with few calls wait for those with many.
            if has_answered and self._loop.is_late:
                await self._send_answered()
                if lent is not self._lent:
                    return
                await trio.lowlevel.checkpoint()
            has_answered = True
            # Each has context variables of its own, as it would have in a task of its own.
            call = self._whole.popleft()
            await told_of_waiting(self._serve(call, lent), self._hand_over, copy_context())
            if lent is not self._lent:
                return
        await self._send_answered()
        if lent is not self._lent:
            return
        self._is_answering = False
        if self.core.waiting_bytes:
            self._unsent.wake()

    async def _send_answered(self) -> None:
        """Send what has been answered so far; another task reads from then on if that has to wait."""
        if isinstance(self._stream, DirectStream) and not self._broken:
            await told_of_waiting(self._flush_or_abandon(), self._hand_over)
            # Who has its answers asks again, more often than not.
            self._stream.expect()

    def _hand_over(self) -> None:
        """Have another task read, and others answer what was read, as this one is about to wait."""
        self._is_answering = False
        self._lent.is_kept = True
        self._lent = LentScope()
        self._start_whole()
        self._nursery.start_soon(self._read)
        if self.core.waiting_bytes:
            self._unsent.wake()

    def _start_whole(self) -> None:
        for call in self._whole:
            self._nursery.start_soon(self._serve, call, name=call.path)
        self._whole.clear()

    def _stop_reading(self) -> None:
        """Have the reader end, once it has sent what it answers at the moment."""
        self._stops_reading = True
        if not self._is_answering:
            self._lent.scope.cancel()

    def mark_dirty(self) -> None:
        """Let the writer send what waits in the core, unless the reader does so in a moment."""
        if not self._is_answering:
            self._unsent.wake()

    @property
    def _has_nothing_left(self) -> bool:
        """True if the peer has ended the connection and nothing waits for the peer: the connection closes at once."""
        return self._has_left and not self.calls and not self.core.waiting_bytes and not self._is_flushing

    async def _linger(self) -> None:
        """Say goodbye, and drop what still comes: closed with bytes unread, the connection would be reset."""
        transport = transport_of(self._stream)
        if isinstance(transport, trio.abc.HalfCloseableStream):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await transport.send_eof()
                while await transport.receive_some(_READ_BYTES):
                    pass

    async def _write(self) -> None:
        try:
            while not self._broken:
                await self._flush_or_abandon()
                if self._closing and not self._is_flushing:
                    return
                await self._unsent.wait()
        finally:
            self._written.set()

    async def _flush_or_abandon(self) -> None:
        try:
            await self._flush()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.abandon()

    async def _flush(self) -> None:
        """Send all that waits in the core; nothing where another task does so already.

        Not a checkpoint where the socket takes it all.
        """
        if self._is_flushing:
            return
        self._is_flushing = True
        try:
            while size := self.core.waiting_bytes:
                data, share = self.core.take_outbound(), self.share
                share.add(size - self.senders.counted)
                self.senders.counted = 0
                if self.senders:
                    self.senders.let_next()
                self._stall.is_writing = True
                await self._send(data)
                self._stall.is_writing = False
                self._stall.written += size
                share.give_back(size)
        finally:
            self._is_flushing = False
            if self._closing:
                self._unsent.wake()

    async def _send(self, data: list[Buffer]) -> None:
        if len(data) == 1:
            await self._stream.send_all(data[0])
        elif isinstance(self._stream, DirectStream):
            await self._stream.send_buffers(data)
        else:
            await self._stream.send_all(b"".join(data))

    async def _serve(self, call: Call, lent: LentScope | None = None) -> None:
        try:
            await call.run(lent)
        finally:
            del self.calls[call.state.stream_id]
            self.core.release(call.state)
            if not self._is_answering and self.core.waiting_bytes:
                self._unsent.wake()
            if self.core.draining:
                self._end_if_drained()

    # -- events --------------------------------------------------------------------------------------------------

    def _on_request(self, event: RequestStarted) -> None:
        state = event.stream
        handler = self._routes.get(state.head.path) or self._further.get(state.head.path)
        if state.head.refusal is not None:
            self._refuse(event, state.head.refusal)
        elif handler is None:
            self._refuse(event, trailers_only_block(Status.UNIMPLEMENTED, f"unknown method {state.head.path}"))
        else:
            call = self.calls[state.stream_id] = Call(self, state, handler)
            if handler.cardinality.client_streaming:
                self._nursery.start_soon(self._serve, call, name=call.path)
            else:
                self._fresh.append(call)

    def _refuse(self, event: RequestStarted, block: bytes) -> None:
        self.core.send_headers(event.stream, block, end_stream=True)
        self.core.release(event.stream)

    def _on_data(self, event: DataReceived) -> None:
        call = self.calls.get(event.stream.stream_id)
        if call is not None:
            call.data_arrived()

    def _on_reset(self, event: StreamReset) -> None:
        call = self.calls.get(event.stream.stream_id)
        if call is not None:
            call.cancel()
        else:
            self.core.release(event.stream)

    def _on_window(self, event: WindowOpened) -> None:
        if event.stream is None:
            self.senders.let_next()
        else:
            self.senders.wake(event.stream.stream_id)

    def _on_ping_acknowledged(self, event: PingAcknowledged) -> None:
        if event.payload == _DRAIN_PING:
            self._name_last_stream()

    def _on_peer_leaving(self, _event: PeerLeaving) -> None:
        self._name_last_stream()

    _dispatch: ClassVar[Mapping[type[Event], Callable[..., None]]] = {
        RequestStarted: _on_request,
        DataReceived: _on_data,
        StreamReset: _on_reset,
        WindowOpened: _on_window,
        PingAcknowledged: _on_ping_acknowledged,
        PeerLeaving: _on_peer_leaving,
    }

    # -- the connection's end ------------------------------------------------------------------------------------

    async def drain(self, grace_seconds: float) -> int:
        """Close gently: announce it, let the calls finish, then cancel them with UNAVAILABLE.

        The client is told first that the end is near and then, when it has read that, which stream was the last, so
        that no call is lost in between. Returns when the connection is closed, or when only handlers that do not
        react to cancellation keep it, how many calls were cancelled.

        Cancellation: leaves the drain where it is.
        """
        deadline = trio.current_time() + grace_seconds
        if not self._drain_announced:
            self._drain_announced = True
            self.core.announce_drain()
            self.core.send_ping(_DRAIN_PING)
            self.mark_dirty()
        with trio.move_on_at(min(deadline, trio.current_time() + _ANNOUNCEMENT_SECONDS)):
            await self._last_stream_named.wait()
        await self._endings.pace.turn()
        self._name_last_stream()
        with trio.move_on_at(deadline):
            await self.closed.wait()
        if not self.closed.is_set():
            await self._endings.pace.turn()
        cut = list(self.calls.values())
        for call in cut:
            call.cancel(GRPCError(Status.UNAVAILABLE, "the server is shutting down"))
        with trio.move_on_after(self.limits.flush_seconds):
            await self.closed.wait()
        self.abandon()
        with trio.move_on_after(self.limits.flush_seconds):
            await self.closed.wait()
        return len(cut)

    def _name_last_stream(self) -> None:
        if self.core.draining:
            return
        self.core.drain()
        self._last_stream_named.set()
        self.mark_dirty()
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        # Not asked of the calls: a stream that was read together with what named the last one is no call yet.
        if self.core.draining and not self.core.streams:
            self._stop_reading()

    def abandon(self) -> None:
        """Close without another word."""
        self._broken = True
        self._stop_reading()

    def look_after(self, now: float) -> None:
        """Do what time demands: handshake, keepalive and age."""
        limits = self.limits
        if not self.core.ready:
            if now - self._opened_at >= limits.handshake_seconds:
                self.abandon()
            return
        self._keep_alive(now)
        self._cut_stalled(now)
        if not self._too_old and now - self._opened_at >= limits.max_connection_age_seconds:
            self._too_old = True
            self._nursery.start_soon(self.drain, limits.connection_age_grace_seconds)

    def _cut_stalled(self, now: float) -> None:
        """Give up streams, or the connection, whose peer has taken nothing for too long of what waits for it."""
        stalled = self._stall.look(now, self.share.answers.patience_seconds)
        if stalled is None:
            self.faults.tell("client takes no answers: connection cut", peer=self.peer.address.endpoint)
            self.abandon()
            return
        for stream in stalled:
            self.faults.tell(
                "client takes no answer: stream cut", peer=self.peer.address.endpoint, path=stream.head.path
            )
            self.core.reset(stream, ErrorCode.CANCEL)
            self.mark_dirty()
            call = self.calls.get(stream.stream_id)
            if call is not None:
                call.cancel()

    def _keep_alive(self, now: float) -> None:
        if self._heard_at >= self._pinged_at:
            self._pinged_at = math.inf
        if now - self._pinged_at >= self.limits.keepalive_timeout_seconds:
            silent = now - self._heard_at
            self.faults.tell("keepalive unanswered", peer=self.peer.address.endpoint, silent_seconds=silent)
            self.abandon()
        elif self._pinged_at == math.inf and now - self._heard_at >= self.limits.keepalive_idle_seconds:
            self._pinged_at = now
            self.core.send_ping(_KEEPALIVE_PING)
            self.mark_dirty()

    def _check_backlog(self) -> None:
        if self.core.waiting_bytes > self.limits.max_write_backlog_bytes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "peer does not read")


async def close_stream(stream: trio.abc.Stream) -> None:
    """Close a stream, forcefully if the peer does not let it go in time; whether it is broken does not matter.

    Cancellation: shielded, and bounded by a second.
    """
    if isinstance(stream, DirectStream):
        await close_now(stream)
        return
    with trio.move_on_after(_CLOSE_SECONDS, shield=True), suppress(trio.BrokenResourceError, OSError):
        await stream.aclose()
