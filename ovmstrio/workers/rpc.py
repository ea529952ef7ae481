"""RPC between the workers of a server, over abstract Unix sockets.

::

    ask(row, value) ──> one connection per pair of workers ──> answer(value), a task each
                        result or error  <─────────────────────┘

Calls with an order are sent in that order, retries included, and run one after the other.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from bisect import insort
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from operator import attrgetter
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.core.worker_peers import StreamedResult
from ovmstrio.isolation.channel import MessageChannel
from ovmstrio.isolation.messages import (
    MALFORMED_MESSAGE_ERRORS,
    PackedMessage,
    decode_error,
    encode_error,
    encode_packed,
)
from ovmstrio.transport.accept_loop import OUT_OF_RESOURCES_ERRNOS, PAUSE_SECONDS
from ovmstrio.transport.direct_stream import run_eagerly
from ovmstrio.workers.handoff import close_on_fork

# Client connection

log = structlog.get_logger(__name__)

CANCEL: Final = 0
"""Message number of cancellations."""
ANSWERED, FAILED, NOT_BEGUN, PART = range(4)
"""Outcomes of a call."""

Order = Sequence[Any]
"""Key of calls that run one after the other; plain data."""
WORKER_STARTING: Final = "the responsible worker is starting; send the request again"
_LOST: Final = "the responsible worker exited before it answered"


class PeerGone(NotReady):
    """The worker exited or does not answer."""


class PeerUnreachable(PeerGone):
    """The worker has not started the call, which may be sent again."""


class PendingCall:
    """A pending call."""

    __slots__ = ("heard", "is_answered", "is_parked", "number", "outcome", "task", "value")

    def __init__(self, number: int, heard: Callable[[Any], None] | None = None) -> None:
        self.number = number
        self.heard = heard
        self.task = trio.lowlevel.current_task()
        self.is_parked = False
        self.is_answered = False
        self.outcome = FAILED
        self.value: Any = None

    def wake(self) -> None:
        """Wake the waiting task."""
        if self.is_parked:
            self.is_parked = False
            trio.lowlevel.reschedule(self.task)


class PeerLink:
    """Connection to another worker."""

    def __init__(self, channel: MessageChannel) -> None:
        self.is_gone = False
        self._channel = channel
        self._numbers = itertools.count(CANCEL + 1)
        self._waiting: dict[int, PendingCall] = {}

    async def run(self) -> None:
        """Receive results until the connection is closed; wakes pending calls at the end."""
        try:
            while (message := await self._channel.receive()) is not None:
                number, outcome, value = message.value
                if message.tail is not None:
                    value.append(message.tail)
                if outcome == PART:
                    waiting = self._waiting.get(number)
                    if waiting is not None and waiting.heard is not None:
                        waiting.heard(value)
                    continue
                waiting = self._waiting.pop(number, None)
                if waiting is not None:
                    waiting.is_answered, waiting.outcome, waiting.value = True, outcome, value
                    waiting.wake()
                del message, value, waiting
        except MALFORMED_MESSAGE_ERRORS as error:
            log.error("worker RPC connection failed", reason=repr(error))  # noqa: TRY400 - no error of this worker
        finally:
            self.is_gone = True
            self._channel.close()
            waiting_still, self._waiting = self._waiting, {}
            for waiting in waiting_still.values():
                waiting.wake()

    async def ask(self, value: Any) -> Any:
        """Send a call and return its result; as :meth:`WorkerRpc.ask`."""
        return await self.wait(await self.send(value, None))

    def send_now(self, value: PackedMessage, order: Order | None) -> PendingCall | None:
        """Send a call without waiting and return the pending call; None if that is not possible."""
        number = next(self._numbers)
        packet = encode_packed([number, value.head, order], value.buffers)
        try:
            if packet is None or not self._channel.try_send_packet(packet):
                return None
        except trio.BrokenResourceError:
            return None
        waiting = self._waiting[number] = PendingCall(number)
        return waiting

    async def send(self, value: Any, order: Order | None, heard: Callable[[Any], None] | None = None) -> PendingCall:
        """Send a call and return the pending call; raises NotReady if the worker has exited."""
        if self.is_gone:
            raise PeerUnreachable(WORKER_STARTING)
        waiting = PendingCall(next(self._numbers), heard)
        self._waiting[waiting.number] = waiting
        try:
            await send_message(self._channel, [waiting.number, value, order])
        except BaseException as error:
            self._waiting.pop(waiting.number, None)
            if isinstance(error, trio.BrokenResourceError):
                self.is_gone = True
                raise PeerUnreachable(WORKER_STARTING) from None
            raise
        return waiting

    async def wait(self, waiting: PendingCall) -> Any:
        """Return the result of a pending call; as :meth:`WorkerRpc.ask`."""
        try:
            if not (waiting.is_answered or self.is_gone):
                await self._park(waiting)
        finally:
            self._waiting.pop(waiting.number, None)
        if not waiting.is_answered:
            raise PeerGone(_LOST)
        if waiting.outcome == NOT_BEGUN:
            raise PeerUnreachable(WORKER_STARTING)
        if waiting.outcome == FAILED:
            raise decode_error(waiting.value)
        return waiting.value

    async def _park(self, waiting: PendingCall) -> None:
        """Park the task; cancellation is sent to the other worker."""

        def leave(_: Any) -> trio.lowlevel.Abort:
            waiting.is_parked = False
            # Otherwise locks that the worker holds for this call would not be released.
            self._channel.send_or_queue([CANCEL, waiting.number, None])
            return trio.lowlevel.Abort.SUCCEEDED

        waiting.is_parked = True
        await trio.lowlevel.wait_task_rescheduled(leave)


async def send_message(channel: MessageChannel, message: list[Any]) -> None:
    """Send a message, one member of which may be packed.

    Raises:
        TypeError, ValueError, OSError, BrokenResourceError: as :meth:`MessageChannel.send`.
    """
    for place, each in enumerate(message):
        if isinstance(each, PackedMessage):
            message[place] = each.head
            packet = encode_packed(message, each.buffers)
            if packet is not None:
                await channel.send_packet(packet)
                return
            # Too large for one packet: sent as ordinary bytes.
            message[place] = [*each.head, b"".join(each.buffers)]
            break
    await channel.send(message)


# Retries


class RetryQueue:
    """Calls to be retried, by worker and order.

    Attributes:
        lines: queues of retries; almost always empty.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[RetryTicket]] = {}
        self._numbers = itertools.count()

    def place(self, row: int, order: Order) -> RetryTicket:
        """Return a ticket for a call, which may have to be retried."""
        return RetryTicket(self, next(self._numbers), row, order)


class RetryTicket:
    """Position of a call among retries; queued only if needed.

    Attributes:
        number: grows with the start of calls.
    """

    __slots__ = ("_is_late", "_moved", "_order", "_retries", "_row", "number")

    def __init__(self, late: RetryQueue, number: int, row: int, order: Order) -> None:
        self.number = number
        self._retries = late
        self._row = row
        self._order = order
        self._is_late = False
        self._moved: trio.Event | None = None

    @property
    def _line(self) -> tuple[int, str]:
        return self._row, repr(self._order)

    def can_send(self) -> bool:
        """Return whether no earlier call is queued for retry; otherwise queue this one."""
        if not self._retries.lines:
            return True
        line = self._retries.lines.get(self._line)
        if line is None or line[0].number >= self.number:
            return True
        self.join()
        return False

    def join(self) -> None:
        """Queue the call for retry; later calls of its order wait until it was sent or given up."""
        if not self._is_late:
            self._is_late = True
            insort(self._retries.lines.setdefault(self._line, []), self, key=attrgetter("number"))

    async def wait(self) -> None:
        """Wait for earlier calls."""
        # Earlier calls may be about to learn that they must be retried.
        await trio.lowlevel.checkpoint()
        while not self.can_send():
            moved = self._moved = trio.Event()
            await moved.wait()

    def leave(self) -> None:
        """Leave the queue and wake the next call."""
        if self._is_late:
            self._is_late = False
            line = self._retries.lines[self._line]
            line.remove(self)
            if not line:
                del self._retries.lines[self._line]
            elif (moved := line[0]._moved) is not None:  # noqa: SLF001 - same class
                moved.set()


# Server and calls

_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_LEAVE_SECONDS: Final = 5.0
FAREWELL: Final = "left"
"""RPC by which a worker reports that it needs no more answers."""
_START_TIMEOUT_SECONDS: Final = 30.0
"""Time that an ordered call waits for a starting worker."""

WorkerRpcHandler = Callable[[Any], Awaitable[Any]]


class WorkerRpc:
    """RPC server and client of one worker.

    Args:
        secret: shared by all workers; part of the socket addresses.
    """

    def __init__(self, secret: str, rows: int, row: int) -> None:
        self.rows = rows
        self.row = row
        self._secret = secret
        self._others = [other for other in range(rows) if other != row]
        self._nursery: trio.Nursery | None = None
        self._links: dict[int, PeerLink] = {}
        self._turns = {other: trio.StrictFIFOLock() for other in self._others}
        self._retries = RetryQueue()
        self._changed = trio.Event()
        self._departed: set[int] = set()
        self._accept_scope = trio.CancelScope()
        self._is_closed = False
        self._running_calls = 0

    def _address(self, row: int) -> str:
        # An abstract socket name is free as soon as its process has ended.
        return f"\0ovmstrio-{self._secret}-{row}"

    async def run(
        self, answer: WorkerRpcHandler, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the RPC server and own client connections until cancelled.

        Args:
            answer: handles a call; server errors are returned to the caller.
            task_status: reports that calls are accepted.

        Raises:
            OSError: the address is in use.
        """
        with close_on_fork(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as end:
            listener = trio.socket.from_stdlib_socket(end)
            await listener.bind(self._address(self.row))
            listener.listen(_BACKLOG)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                try:
                    with self._accept_scope:
                        await self._accept_all(listener, nursery, answer)
                    listener.close()
                    await trio.sleep_forever()
                finally:
                    self._nursery = None

    async def _accept_all(
        self, listener: trio.socket.SocketType, nursery: trio.Nursery, answer: WorkerRpcHandler
    ) -> None:
        while True:
            try:
                accepted, _ = await listener.accept()
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES_ERRNOS:
                    raise
                log.warning("worker RPC accept failed", reason=error.strerror)
                await trio.sleep(PAUSE_SECONDS)
                continue
            if _is_same_user(accepted):
                nursery.start_soon(self._handle_connection, _detached(accepted), answer)
            else:
                accepted.close()

    async def _handle_connection(self, end: socket.socket, answer: WorkerRpcHandler) -> None:
        channel = MessageChannel(end)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive_calls, _ServerConnection(channel, nursery, answer))
        finally:
            channel.close()

    async def _receive_calls(self, connection: _ServerConnection) -> None:
        """Receive calls until the connection is closed, or a call blocks and another task takes over.

        Calls that do not block, such as most sequence steps, need no task of their own.
        """
        try:
            while (call := await self._next_call(connection)) is not None:
                task = connection.task
                await run_eagerly(
                    self._handle_call(connection, call), partial(self._continue_in_task, connection), copy_context()
                )
                del call
                if connection.task is not task:
                    return
        except trio.BrokenResourceError:
            pass
        except MALFORMED_MESSAGE_ERRORS as error:
            log.error("worker RPC connection failed", reason=repr(error))  # noqa: TRY400 - no error of this worker
        # The connection is closed: cancel its calls.
        connection.nursery.cancel_scope.cancel()

    def _continue_in_task(self, connection: _ServerConnection) -> None:
        connection.task += 1
        connection.nursery.start_soon(self._receive_calls, connection)

    async def _next_call(self, connection: _ServerConnection) -> _RunningCall | None:
        """Wait for a call; None once the connection is closed."""
        while (message := await connection.channel.receive()) is not None:
            number, value, order = message.value
            if message.tail is not None:
                value.append(message.tail)
            if number == CANCEL:
                if value in connection.questions:
                    connection.questions[value].scope.cancel()
            elif order is not None and self._is_closed:
                await connection.channel.send([number, NOT_BEGUN, None])
            else:
                turn = None if order is None else _OrderedCall(connection.last, repr(order))
                call = connection.questions[number] = _RunningCall(number, value, turn)
                return call
            del message, value
        return None

    async def _handle_call(self, connection: _ServerConnection, call: _RunningCall) -> None:
        channel = connection.channel
        self._running_calls += 1
        try:
            with call.scope:
                try:
                    if call.turn is not None:
                        await call.turn.wait()
                    reply = [
                        call.number,
                        ANSWERED,
                        await self._send_parts(channel, call, await connection.answer(call.value)),
                    ]
                except Exception as error:  # noqa: BLE001 - raised in the caller
                    reply = [call.number, FAILED, encode_error(error)]
                with suppress(trio.BrokenResourceError):
                    try:
                        await send_message(channel, reply)
                    except (TypeError, ValueError, OSError) as error:
                        await channel.send([call.number, FAILED, encode_error(error)])
        finally:
            del connection.questions[call.number]
            if call.turn is not None:
                call.turn.end()
            self._running_calls -= 1
            if self._is_closed and not self._running_calls:
                self.announce()

    async def _send_parts(self, channel: MessageChannel, call: _RunningCall, reply: Any) -> Any:
        """Send the parts of a streamed result; return other results."""
        if not isinstance(reply, StreamedResult):
            return reply
        try:
            async for part in reply:
                await channel.send([call.number, PART, part])
        except trio.BrokenResourceError:
            pass
        finally:
            reply.close()
        return None

    def announce(self) -> None:
        """Wake tasks that wait for another worker, as one has started or exited."""
        self._changed.set()
        self._changed = trio.Event()

    def record_farewell(self, row: int) -> None:
        """Record that a worker needs no more answers."""
        self._departed.add(row)
        self.announce()

    async def leave(
        self,
        others: AbstractSet[int] | None,
        seconds: float = _LEAVE_SECONDS,
        last: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """Reject further ordered calls and wait for running ones.

        Args:
            others: workers that exit too and are waited for; None if this one exits alone.
            seconds: time limit for their farewells.
            last: runs after the farewells.
        """
        with trio.move_on_after(seconds):
            if others is not None:
                # Workers that are not waited for may wait for this one.
                with suppress(Exception):
                    await self.ask_all(FAREWELL, self.row)
            while not self._departed.issuperset(others or ()):
                await self._changed.wait()
        await last()
        self._is_closed = True
        self._accept_scope.cancel()
        with trio.move_on_after(_LEAVE_SECONDS):
            while self._running_calls:
                await self._changed.wait()

    async def ask(
        self, row: int, value: Any, order: Order | None = None, is_its: Callable[[], bool] = lambda: True
    ) -> Any:
        """Call another worker.

        Args:
            row: index of the worker.
            value: plain data and arrays.
            order: key of calls that run one after the other; such a call waits for a starting worker.
            is_its: returns whether the call still belongs to that worker.

        Raises:
            NotBegun: the worker cannot be reached, and the call does not belong to it any more.
            NotReady: the worker cannot be reached, or exited.
            Exception: the call failed there.
        """
        if order is None:
            return await (await self._connect(row)).ask(value)
        place = self._retries.place(row, order)
        try:
            return await self._ask_in_order(row, value, order, place, is_its)
        finally:
            place.leave()

    async def _ask_in_order(
        self, row: int, value: Any, order: Order, place: RetryTicket, is_its: Callable[[], bool]
    ) -> Any:
        deadline = trio.current_time() + _START_TIMEOUT_SECONDS
        sent = self._send_now(row, value, order) if isinstance(value, PackedMessage) and place.can_send() else None
        while True:
            changed = self._changed
            try:
                if sent is None:
                    # The time limit is for sending, not for the result.
                    with trio.CancelScope(deadline=deadline) as reaching:
                        sent = await self._send_in_turn(row, value, order, place)
                if sent is not None:
                    (link, pending), sent = sent, None
                    place.leave()
                    return await link.wait(pending)
            except PeerUnreachable:
                place.join()
                with trio.CancelScope(deadline=deadline) as reaching:
                    await place.wait()
                    if not is_its():
                        raise
                    await changed.wait()
            if reaching.cancelled_caught:
                raise NotReady(WORKER_STARTING)

    def _send_now(self, row: int, value: PackedMessage, order: Order) -> tuple[PeerLink, PendingCall] | None:
        link = self._links.get(row)
        if link is None or link.is_gone or self._turns[row].locked():
            return None
        pending = link.send_now(value, order)
        return None if pending is None else (link, pending)

    async def _send_in_turn(
        self, row: int, value: Any, order: Order, place: RetryTicket
    ) -> tuple[PeerLink, PendingCall]:
        turn = self._turns[row]
        while True:
            try:
                turn.acquire_nowait()
            except trio.WouldBlock:
                await turn.acquire()
            try:
                if place.can_send():
                    link = await self._connect(row)
                    return link, await link.send(value, order)
            finally:
                turn.release()
            await place.wait()

    async def listen(self, row: int, value: Any, heard: Callable[[Any], None]) -> Any:
        """Call another worker for a streamed result, and return the final value.

        Args:
            row: index of the worker.
            value: the call.
            heard: is called with each part; must not block.

        Raises:
            NotReady: the worker cannot be reached, or exited.
            Exception: the call failed there.
        """
        link = await self._connect(row)
        return await link.wait(await link.send(value, None, heard))

    async def wait_change(self) -> None:
        """Wait until another worker has started, exited, or changed its readiness."""
        await self._changed.wait()

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Call all reachable workers; as :meth:`ask_each`."""
        return list((await self.call_each(question, *arguments, limit_seconds=limit_seconds)).values())

    async def call_each(self, question: str, *arguments: Any, limit_seconds: float = 60) -> dict[int, Any]:
        """Call all reachable workers and return the results by worker.

        Raises:
            NotReady: a worker timed out.
            Exception: a call failed; all failures are logged.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        silent = set(self._others)

        async def ask_one(row: int) -> None:
            try:
                answers[row] = await (await self._connect(row)).ask([question, *arguments])
            except PeerGone:
                pass  # Not running: it starts with the current state.
            except Exception as error:  # noqa: BLE001 - raised below, after all results
                errors[row] = error
            silent.discard(row)

        with trio.move_on_after(limit_seconds) as scope:
            async with trio.open_nursery() as nursery:
                for row in self._others:
                    nursery.start_soon(ask_one, row)
        if scope.cancelled_caught:
            rows = ", ".join(map(str, sorted(silent)))
            raise NotReady(f"workers {rows} of {self.rows} timed out after {limit_seconds:g} s")
        for row, error in errors.items():
            log.warning("worker RPC failed", other=row, question=question, reason=str(error))
        for row, error in errors.items():
            raise _with_worker(error, row)
        return answers

    async def ask_soon(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Call workers, return results that arrive in time; see :class:`ovmstrio.core.worker_peers.WorkerPeers`."""
        answers: dict[int, Any] = {}

        async def ask_one(row: int, question: Sequence[Any]) -> None:
            try:
                answers[row] = await (await self._connect(row)).ask(list(question))
            except NotReady:
                pass  # Not running.
            except Exception as error:  # noqa: BLE001 - other results are still needed
                log.warning("worker RPC failed", other=row, question=question[0], reason=str(error))

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for row, question in questions.items():
                    nursery.start_soon(ask_one, row, question)
        return answers

    async def _connect(self, row: int) -> PeerLink:
        known = self._links.get(row)
        if known is not None and not known.is_gone:
            return known
        if self._nursery is None:
            raise NotReady("the server is shutting down")
        end = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            await end.connect(self._address(row))
            # Any process can bind a free abstract address.
            is_own = _is_same_user(end)
        except OSError:
            is_own = False
        except BaseException:
            end.close()
            raise
        if not is_own:
            end.close()
            raise PeerUnreachable(WORKER_STARTING)
        # Another task may have connected meanwhile.
        known = self._links.get(row)
        if known is not None and not known.is_gone:
            end.close()
            return known
        link = self._links[row] = PeerLink(MessageChannel(_detached(end)))
        self._nursery.start_soon(link.run)
        return link


class _OrderedCall:
    """Position of a call within its order."""

    def __init__(self, last: dict[str, _OrderedCall], order: str) -> None:
        self._last = last
        self._order = order
        self.before = last.get(order)
        self.ended = trio.Event()
        last[order] = self

    async def wait(self) -> None:
        """Wait for the previous calls."""
        while self.before is not None:
            await self.before.ended.wait()
            # A call that ended before it could start had others before it.
            self.before = self.before.before

    def end(self) -> None:
        """Release the next call after the previous ones."""
        self.ended.set()
        if self._last.get(self._order) is not self:
            return
        before = self.before
        while before is not None and before.ended.is_set():
            before = before.before
        if before is None:
            del self._last[self._order]
        else:
            self._last[self._order] = before


class _ServerConnection:
    """Connection of a calling worker.

    Attributes:
        nursery: tasks that receive and handle calls.
        questions: running calls by number.
        last: last call by order.
        task: number of the receiving task.
    """

    __slots__ = ("answer", "channel", "last", "nursery", "questions", "task")

    def __init__(self, channel: MessageChannel, nursery: trio.Nursery, answer: WorkerRpcHandler) -> None:
        self.channel = channel
        self.nursery = nursery
        self.answer = answer
        self.questions: dict[int, _RunningCall] = {}
        self.last: dict[str, _OrderedCall] = {}
        self.task = 0


class _RunningCall:
    __slots__ = ("number", "scope", "turn", "value")

    def __init__(self, number: int, value: Any, turn: _OrderedCall | None) -> None:
        self.number = number
        self.value = value
        self.turn = turn
        self.scope = trio.CancelScope()


def _detached(taken: trio.socket.SocketType) -> socket.socket:
    return close_on_fork(socket.socket(fileno=taken.detach()))


def _with_worker(error: Exception, row: int) -> Exception:
    if isinstance(error, ServerError):
        error.message = f"worker {row}: {error.message}"
        error.args = (error.message,)
    return error


def _is_same_user(end: trio.socket.SocketType) -> bool:
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return bool(user == os.geteuid())
