"""One HTTP/2 connection of the gRPC server: reader task, writer task, and calls.

The reader answers complete requests one after the other and sends their responses together. When a call blocks, the
reader task stays with that call and a new task reads. A call that never blocks needs no task.

The writer sleeps until data is marked dirty and then sends all of it, so responses of many calls share one system call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

import structlog
import trio
from grpclib.const import Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from ovmstrio.core.connection import Peer
from ovmstrio.core.events import RequestObserver
from ovmstrio.core.request import ArrivalOrder
from ovmstrio.telemetry.log_rate_limit import LogRateLimiter
from ovmstrio.telemetry.loop_utilization import current_loop_utilization
from ovmstrio.transport.accept_loop import TurnLimiter
from ovmstrio.transport.direct_stream import (
    MAX_WRITEV_BUFFERS,
    DirectStream,
    close_forcefully,
    linger,
    run_eagerly,
    send_buffers,
)
from ovmstrio.transport.grpc.call import Call, FailureTranslator, Inflater, ReusableScope
from ovmstrio.transport.grpc.frames import ConnectionFault, ErrorCode
from ovmstrio.transport.grpc.headers import trailers_only_block
from ovmstrio.transport.grpc.http2 import (
    DataReceived,
    Event,
    GoAwayReceived,
    PingAcknowledged,
    RequestStarted,
    ServerCore,
    StreamReset,
    StreamState,
    WindowOpened,
)
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.senders import BlockedSenders, Wakeup
from ovmstrio.transport.send_budget import ConnectionBudget, ProgressTimer, current_connection_budget, unsent_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

# -- Stalled peers -----------------------------------------------------------------------------------------------------


class StallWatch:
    """Detector of a peer that does not read its responses; the writer maintains ``is_writing`` and ``written`` (bytes).

    Streams without waiting data never count as stalled.
    """

    def __init__(self, core: ServerCore, senders: BlockedSenders, stream: trio.abc.Stream) -> None:
        self._core = core
        self._senders = senders
        self._stream = stream
        now = trio.current_time()
        self._socket = ProgressTimer(now)
        self._window = ProgressTimer(now)
        self.is_writing = False
        self.written = 0

    def look(self, now: float, stall_timeout_seconds: float) -> list[StreamState] | None:
        """Return the streams whose windows the peer has kept closed for too long; None if it reads nothing at all."""
        # Only the socket's unsent bytes distinguish a blocked write from a write that started since the last call.
        sent = (self.written, unsent_bytes(self._stream)) if self.is_writing else now
        if self._socket.seconds(sent, now) >= stall_timeout_seconds:
            return None
        windows, stalled_streams = self._core.windows, self._senders.stalled_streams(now, stall_timeout_seconds)
        window_seconds = self._window.seconds(windows.connection if self._senders else now, now)
        if stalled_streams and len(stalled_streams) == len(self._senders) and window_seconds >= stall_timeout_seconds:
            return None
        return [stream for stream in stalled_streams if windows.of(stream) <= 0]


# -- Cancellation of calls when connections end ------------------------------------------------------------------------

_CALLS_PER_BATCH: Final = 32
_CHECKPOINTS_PER_BATCH: Final = 2
"""Cancellation is delivered in the first pass; in the second most of the calls have ended and freed their memory."""


class CancelPacer:
    """Paced cancellation of the calls of closed connections, one connection after the other, a few calls at a time.

    ``pace`` limits connections that end at the same time.
    """

    __slots__ = ("_turn", "pace")

    def __init__(self) -> None:
        self.pace = TurnLimiter()
        self._turn: trio.Lock | None = None

    async def cancel(self, calls: Collection[Call]) -> None:
        """Cancel calls whose client has disconnected; some may still be running on return.

        Cancellation: the caller must cancel the remaining calls.
        """
        if not calls:
            return
        if self._turn is None:
            self._turn = trio.Lock()
        left = list(calls)
        async with self._turn:
            while left:
                for call in left[-_CALLS_PER_BATCH:]:
                    call.abandon()
                del left[-_CALLS_PER_BATCH:]
                for _ in range(_CHECKPOINTS_PER_BATCH):
                    await trio.lowlevel.checkpoint()


# -- Connection --------------------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)

_KEEPALIVE_PING = b"alive?\0\0"
_DRAIN_PING = b"drain\0\0\0"
_DRAIN_ACK_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 1.0
_READ_BYTES: Final = 64 * 1024
_LARGE_READ_BYTES: Final = 512 * 1024


class Routes(Protocol):
    """Dynamic lookup of handlers."""

    def get(self, path: str, /) -> Handler | None:
        """Return the handler of a path; the handler may replace itself before it receives anything."""
        ...


NO_ROUTES: Final[Routes] = MappingProxyType[str, Handler]({})


class Connection:
    """One client connection. ``run`` owns the stream, the writer and all calls.

    Attributes:
        arrivals: order of complete unary requests.
        calls: running calls by stream id.
        faults: rate-limited log of peer faults.
        inflater: message decompressor.
        observer: notified of every call; None for none.
        count_oversized: counts a request message above the size limit.
        senders: messages that wait for the peer.
        share: send budget of the connection.
        closed: set when ``run`` has ended.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        routes: Mapping[str, Handler],
        codec: CodecBase,
        *,
        fallback_routes: Routes = NO_ROUTES,
        limits: TransportLimits,
        failures: FailureTranslator,
        fault_log: LogRateLimiter,
        cancel_pacer: CancelPacer,
        budget: ConnectionBudget,
        peer: Peer,
        observer: RequestObserver | None = None,
        count_oversized: Callable[[], object] = lambda: None,
    ) -> None:
        self.observer = observer
        self.count_oversized = count_oversized
        self.recorded_body_bytes = 0 if observer is None else observer.body_bytes
        self.arrivals = ArrivalOrder()
        self.core = ServerCore(limits, trio.current_time)
        self.codec = codec
        self.limits = limits
        self.failures = failures
        self.peer = peer
        self.calls: dict[int, Call] = {}
        self.faults = fault_log
        self._endings = cancel_pacer
        self._stream = stream
        self._routes = routes
        self._fallback_routes = fallback_routes
        self._read_bytes = _READ_BYTES
        self._read_to_end = trio.Event()
        self._is_reading_stopped = False
        self._new_calls: list[Call] = []
        self._complete_calls: deque[Call] = deque()
        self._reusable_scope = ReusableScope()
        self._loop = current_loop_utilization()
        self._is_answering = False
        self._is_flushing = False
        self._write_wakeup = Wakeup()
        self.share = budget
        self.inflater = Inflater(limits.max_receive_message_bytes)
        self.senders = BlockedSenders(self.core, budget, limits.write_high_water_bytes, self.wake_writer)
        self._stall = StallWatch(self.core, self.senders, stream)
        self._is_closing = False
        self._is_broken = False
        self._is_faulty = False
        self._has_peer_closed = False
        self._opened_at = self._last_read_at = trio.current_time()
        self._pinged_at = math.inf
        self._is_drain_announced = False
        self._is_too_old = False
        self._written = trio.Event()
        self._goaway_sent = trio.Event()
        self.closed = trio.Event()

    # -- Tasks ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the peer until it disconnects, violates the protocol or has been drained.

        Raises an ``ExceptionGroup`` of ``OSError`` and similar if the stream failed below HTTP/2. Cancellation ends all
        calls at once, without notifying the peer.
        """
        current_connection_budget.set(self.share)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write)
                nursery.start_soon(self._read)
                await self._read_to_end.wait()
                if (self._is_faulty or not self._is_broken) and not self._has_nothing_left:
                    self._is_closing = True
                    self._write_wakeup.wake()
                    with trio.move_on_after(self.limits.flush_seconds):
                        await self._written.wait()
                        if not self._is_faulty:
                            await linger(self._stream)
                await self._endings.pace.turn()
                await self._endings.cancel(self.calls.values())
                nursery.cancel_scope.cancel()
                # Closed before the calls have unwound: a handler in a thread may take long.
                await close_stream(self._stream)
        finally:
            self.share.close()
            self.closed.set()

    async def _read(self) -> None:
        """Read and answer until the end of input, or until another task has taken over reading."""
        core, reusable_scope, receive_some = self.core, self._reusable_scope, self._stream.receive_some
        try:
            with reusable_scope:
                while reusable_scope is self._reusable_scope and not self._is_reading_stopped:
                    if core.more:
                        await trio.lowlevel.checkpoint()
                        self._handle(core.go_on())
                    elif data := await receive_some(self._read_bytes):
                        # A full read means that more is waiting; large reads take a large message in few calls.
                        self._read_bytes = _READ_BYTES if len(data) < self._read_bytes else _LARGE_READ_BYTES
                        self._last_read_at = trio.current_time()
                        self._handle(core.receive(data))
                        # A blocked call keeps this task and would keep the read buffer alive.
                        del data
                    else:
                        self._has_peer_closed = True
                        break
                    if self._complete_calls:
                        await self._answer_complete()
        except ConnectionFault as fault:
            self._start_complete()
            self.faults.log_fault(
                "connection fault", peer=self.peer.address.endpoint, kind=fault.code.name, fault=str(fault)
            )
            core.fail(fault)
            self._is_faulty = True
            self.wake_writer()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._is_broken = True
        if reusable_scope is self._reusable_scope:
            self._read_to_end.set()

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            self._dispatch[type(event)](self, event)
        for call in self._new_calls:
            if call.state.is_remote_closed:
                self._complete_calls.append(call)
            else:
                self._nursery.start_soon(self._serve, call, name=call.path)
        self._new_calls.clear()
        self._end_if_drained()
        if self.core.unsent_bytes:
            self._check_backlog()
            self.wake_writer()

    async def _answer_complete(self) -> None:
        """Answer complete requests until one blocks, and send the responses together."""
        reusable_scope = self._reusable_scope
        self._is_answering, has_answered = True, False
        while self._complete_calls:
            # At least one per turn, so that connections with few calls do not wait for busy ones.
            if has_answered and self._loop.is_late:
                await self._send_answered()
                if reusable_scope is not self._reusable_scope:
                    return
                await trio.lowlevel.checkpoint()
            has_answered = True
            # Each call has its own context variables, as in a separate task.
            call = self._complete_calls.popleft()
            await run_eagerly(self._serve(call, reusable_scope), self._hand_over, copy_context())
            if reusable_scope is not self._reusable_scope:
                return
        await self._send_answered()
        if reusable_scope is not self._reusable_scope:
            return
        self._is_answering = False
        if self.core.unsent_bytes:
            self._write_wakeup.wake()

    async def _send_answered(self) -> None:
        """Send the responses so far; if that blocks, another task takes over reading."""
        if isinstance(self._stream, DirectStream) and not self._is_broken:
            await run_eagerly(self._flush_or_abandon(), self._hand_over)
            # A client that has its responses usually sends the next request soon.
            self._stream.expect()

    def _hand_over(self) -> None:
        """Start another task for reading and for the remaining requests, because this task is about to block."""
        self._is_answering = False
        self._reusable_scope.is_kept = True
        self._reusable_scope = ReusableScope()
        self._start_complete()
        self._nursery.start_soon(self._read)
        if self.core.unsent_bytes:
            self._write_wakeup.wake()

    def _start_complete(self) -> None:
        for call in self._complete_calls:
            self._nursery.start_soon(self._serve, call, name=call.path)
        self._complete_calls.clear()

    def _stop_reading(self) -> None:
        """Stop the reader after it has sent its current responses."""
        self._is_reading_stopped = True
        if not self._is_answering:
            self._reusable_scope.scope.cancel()

    def wake_writer(self) -> None:
        """Wake the writer, unless the reader is about to send."""
        if not self._is_answering:
            self._write_wakeup.wake()

    def write_alone(self) -> bool:
        """Write queued bytes at once if the connection has one call and an idle writer; return whether it did."""
        stream, senders = self._stream, self.senders
        if len(self.calls) != 1 or not self._write_wakeup.waiting or self._is_flushing or self._is_answering:
            return False
        if not isinstance(stream, DirectStream) or senders or senders.counted:
            return False
        buffers = self.core.take_outbound()
        try:
            sent = stream.send_now(*buffers[:MAX_WRITEV_BUFFERS])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.abandon()
            return True
        self._stall.written += sent
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if buffers:
            buffers[0] = memoryview(buffers[0])[sent:]
            self.core.return_outbound(buffers)
            self._write_wakeup.wake()
        return True

    @property
    def _has_nothing_left(self) -> bool:
        """True if the peer has ended the connection and nothing waits to be sent, so that it can be closed at once."""
        return self._has_peer_closed and not self.calls and not self.core.unsent_bytes and not self._is_flushing

    async def _write(self) -> None:
        try:
            while not self._is_broken:
                await self._flush_or_abandon()
                if self._is_closing and not self._is_flushing:
                    return
                await self._write_wakeup.wait()
        finally:
            self._written.set()

    async def _flush_or_abandon(self) -> None:
        try:
            await self._flush()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.abandon()

    async def _flush(self) -> None:
        """Send all queued bytes, unless another task is doing so. Not a checkpoint if the socket takes all at once."""
        if self._is_flushing:
            return
        self._is_flushing = True
        try:
            while size := self.core.unsent_bytes:
                data, share = self.core.take_outbound(), self.share
                share.add(size - self.senders.counted)
                self.senders.counted = 0
                if self.senders:
                    self.senders.wake_next()
                self._stall.is_writing = True
                await send_buffers(self._stream, data)
                self._stall.is_writing = False
                self._stall.written += size
                share.release(size)
        finally:
            self._is_flushing = False
            if self._is_closing:
                self._write_wakeup.wake()

    async def _serve(self, call: Call, reusable_scope: ReusableScope | None = None) -> None:
        try:
            await call.run(reusable_scope)
        finally:
            del self.calls[call.state.stream_id]
            self.core.release(call.state)
            if not self._is_answering and self.core.unsent_bytes:
                self._write_wakeup.wake()
            if self.core.draining:
                self._end_if_drained()

    # -- Events --------------------------------------------------------------------------------------------------------

    def _on_request(self, event: RequestStarted) -> None:
        state = event.stream
        handler = self._routes.get(state.head.path) or self._fallback_routes.get(state.head.path)
        if state.head.refusal is not None:
            self._refuse(event, state.head.refusal)
        elif handler is None:
            self._refuse(event, trailers_only_block(Status.UNIMPLEMENTED, f"unknown method {state.head.path}"))
        else:
            call = self.calls[state.stream_id] = Call(self, state, handler)
            if handler.cardinality.client_streaming:
                self._nursery.start_soon(self._serve, call, name=call.path)
            else:
                self._new_calls.append(call)

    def _refuse(self, event: RequestStarted, block: bytes) -> None:
        self.core.send_headers(event.stream, block, end_stream=True)
        self.core.release(event.stream)

    def _on_data(self, event: DataReceived) -> None:
        call = self.calls.get(event.stream.stream_id)
        if call is not None:
            call.on_data()

    def _on_reset(self, event: StreamReset) -> None:
        call = self.calls.get(event.stream.stream_id)
        if call is not None:
            call.cancel()
        else:
            self.core.release(event.stream)

    def _on_window(self, event: WindowOpened) -> None:
        if event.stream is None:
            self.senders.wake_next()
        else:
            self.senders.wake(event.stream.stream_id)

    def _on_ping_acknowledged(self, event: PingAcknowledged) -> None:
        if event.payload == _DRAIN_PING:
            self._name_last_stream()

    def _on_peer_leaving(self, _event: GoAwayReceived) -> None:
        self._name_last_stream()

    _dispatch: ClassVar[Mapping[type[Event], Callable[..., None]]] = {
        RequestStarted: _on_request,
        DataReceived: _on_data,
        StreamReset: _on_reset,
        WindowOpened: _on_window,
        PingAcknowledged: _on_ping_acknowledged,
        GoAwayReceived: _on_peer_leaving,
    }

    # -- End of the connection -----------------------------------------------------------------------------------------

    async def drain(self, grace_seconds: float) -> int:
        """Drain the connection; return how many calls were cancelled.

        Announces the end, waits until the client has acknowledged that, names the last stream (so no call is lost),
        waits for running calls, and cancels the rest with UNAVAILABLE. Returns early if only handlers that ignore
        cancellation remain.
        """
        deadline = trio.current_time() + grace_seconds
        if not self._is_drain_announced:
            self._is_drain_announced = True
            self.core.announce_drain()
            self.core.send_ping(_DRAIN_PING)
            self.wake_writer()
        with trio.move_on_at(min(deadline, trio.current_time() + _DRAIN_ACK_SECONDS)):
            await self._goaway_sent.wait()
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
        self._goaway_sent.set()
        self.wake_writer()
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        # Checks streams, not calls: a stream parsed in the same read as the last GOAWAY or PING has no call yet.
        if self.core.draining and not self.core.streams:
            self._stop_reading()

    def abandon(self) -> None:
        """Close without notifying the peer."""
        self._is_broken = True
        self._stop_reading()

    def check_timers(self, now: float) -> None:
        """Check handshake timeout, keepalive, stalls and connection age."""
        limits = self.limits
        if not self.core.ready:
            if now - self._opened_at >= limits.handshake_seconds:
                self.abandon()
            return
        self._keep_alive(now)
        self._close_stalled(now)
        if not self._is_too_old and now - self._opened_at >= limits.max_connection_age_seconds:
            self._is_too_old = True
            self._nursery.start_soon(self.drain, limits.connection_age_grace_seconds)

    def _close_stalled(self, now: float) -> None:
        """Close the streams, or the connection, of a peer that does not read its responses."""
        stalled_streams = self._stall.look(now, self.share.answers.stall_timeout_seconds)
        if stalled_streams is None:
            self.faults.log_fault("stalled connection closed", peer=self.peer.address.endpoint)
            self.abandon()
            return
        for stream in stalled_streams:
            call = self.calls.get(stream.stream_id)
            path = "" if call is None else call.path
            self.faults.log_fault("stalled stream reset", peer=self.peer.address.endpoint, path=path)
            self.core.reset(stream, ErrorCode.CANCEL)
            self.wake_writer()
            if call is not None:
                call.cancel()

    def _keep_alive(self, now: float) -> None:
        if self._last_read_at >= self._pinged_at:
            self._pinged_at = math.inf
        if now - self._pinged_at >= self.limits.keepalive_timeout_seconds:
            silent = now - self._last_read_at
            self.faults.log_fault("keepalive timed out", peer=self.peer.address.endpoint, silent_seconds=silent)
            self.abandon()
        elif self._pinged_at == math.inf and now - self._last_read_at >= self.limits.keepalive_idle_seconds:
            self._pinged_at = now
            self.core.send_ping(_KEEPALIVE_PING)
            self.wake_writer()

    def _check_backlog(self) -> None:
        if self.core.unsent_bytes > self.limits.max_write_backlog_bytes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "peer does not read")


async def close_stream(stream: trio.abc.Stream) -> None:
    """Close a stream, shielded, and ignore its errors; forcefully if the peer does not cooperate within a second."""
    if isinstance(stream, DirectStream):
        await close_forcefully(stream)
        return
    with trio.move_on_after(_CLOSE_SECONDS, shield=True), suppress(trio.BrokenResourceError, OSError):
        await stream.aclose()
