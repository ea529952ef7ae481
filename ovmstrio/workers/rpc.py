"""RPC between the workers of a server, over abstract Unix sockets.

::

    call(row, value) ─> one connection per pair of workers ──> answer(value), a task each
                        result or error  <─────────────────────┘

Calls are sent in the order of :meth:`WorkerRpc.call`, also those that wait for a restarting worker, and are started in
that order.  A draining worker sends GOAWAY: peers send no more calls, and the worker exits after the received calls.
So a call fails only if its worker dies.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import NotReady, ServerError, WorkerRestarting
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

_CONTROL: Final = 0
"""Message number of cancellations (with the number of the call), READY, GOAWAY and their acknowledgements."""
_ANSWERED, _FAILED, _PART, _READY, _GOAWAY = range(5)
"""Kinds of messages to a caller: outcomes of a call; the worker takes calls; the worker takes no more calls."""
_RESTARTING: Final = "the responsible worker is starting; send the request again"
_LOST: Final = "the responsible worker exited before it answered"
_POLL_SECONDS: Final = 0.02
"""Interval of connection attempts to a restarting worker."""


class PeerGone(NotReady):
    """The worker exited or does not answer."""


class PeerUnreachable(PeerGone):
    """The worker cannot be reached; the call was not sent."""


class _PendingCall:
    __slots__ = ("is_answered", "is_parked", "number", "on_message", "outcome", "task", "value")

    def __init__(self, number: int, on_message: Callable[[Any], None] | None = None) -> None:
        self.number = number
        self.on_message = on_message
        self.task = trio.lowlevel.current_task()
        self.is_parked = False
        self.is_answered = False
        self.outcome = _FAILED
        self.value: Any = None

    def wake(self) -> None:
        if self.is_parked:
            self.is_parked = False
            trio.lowlevel.reschedule(self.task)


class _PeerLink:
    """Connection to another worker, which has sent READY.

    Args:
        left: is called when the worker takes no more calls.
        lost: is called with the number of pending calls when the worker has died.
    """

    def __init__(self, channel: MessageChannel, left: Callable[[_PeerLink], None], lost: Callable[[int], None]) -> None:
        self.is_open = True
        self._lost = lost
        self.must_acknowledge = False
        self._channel = channel
        self._left = left
        self._numbers = itertools.count(_CONTROL + 1)
        self._waiting: dict[int, _PendingCall] = {}

    async def run(self) -> None:
        """Receive results until the connection is closed; wakes pending calls at the end."""
        try:
            while (message := await self._channel.receive()) is not None:
                number, outcome, value = message.value
                if message.tail is not None:
                    value.append(message.tail)
                if number == _CONTROL:
                    self.is_open, self.must_acknowledge = False, True
                    self._left(self)
                    continue
                if outcome == _PART:
                    waiting = self._waiting.get(number)
                    if waiting is not None and waiting.on_message is not None:
                        waiting.on_message(value)
                    continue
                waiting = self._waiting.pop(number, None)
                if waiting is not None:
                    waiting.is_answered, waiting.outcome, waiting.value = True, outcome, value
                    waiting.wake()
                del message, value, waiting
            if self.is_open and self._waiting:
                self._lost(len(self._waiting))
        except MALFORMED_MESSAGE_ERRORS as error:
            log.error("worker RPC connection failed", reason=repr(error))  # noqa: TRY400 - no error of this worker
        finally:
            self.is_open = self.must_acknowledge = False
            self._channel.close()
            waiting_still, self._waiting = self._waiting, {}
            for waiting in waiting_still.values():
                waiting.wake()

    async def acknowledge(self) -> None:
        """Acknowledge the GOAWAY of a worker, which has received all calls."""
        if self.must_acknowledge:
            self.must_acknowledge = False
            with suppress(trio.BrokenResourceError):
                await self._channel.send([_CONTROL, None])

    def send_now(self, value: PackedMessage) -> _PendingCall | None:
        """Send a call without waiting and return the pending call; None if that is not possible."""
        number = next(self._numbers)
        packet = encode_packed([number, value.head], value.buffers)
        try:
            if packet is None or not self._channel.try_send_packet(packet):
                return None
        except trio.BrokenResourceError:
            return None
        waiting = self._waiting[number] = _PendingCall(number)
        return waiting

    async def send(self, value: Any, on_message: Callable[[Any], None] | None = None) -> _PendingCall:
        """Send a call and return the pending call; raises PeerUnreachable if the worker has exited."""
        waiting = _PendingCall(next(self._numbers), on_message)
        self._waiting[waiting.number] = waiting
        try:
            await _send_message(self._channel, [waiting.number, value])
        except BaseException as error:
            self._waiting.pop(waiting.number, None)
            if isinstance(error, trio.BrokenResourceError):
                self.is_open = False
                raise PeerUnreachable(_RESTARTING) from None
            raise
        return waiting

    async def wait(self, waiting: _PendingCall) -> Any:
        """Return the result of a pending call; as :meth:`WorkerRpc.call`."""
        try:
            if not waiting.is_answered and waiting.number in self._waiting:
                await self._park(waiting)
        finally:
            self._waiting.pop(waiting.number, None)
        if not waiting.is_answered:
            raise PeerGone(_LOST)
        if waiting.outcome == _FAILED:
            raise decode_error(waiting.value)
        return waiting.value

    async def _park(self, waiting: _PendingCall) -> None:
        """Park the task; cancellation is sent to the other worker."""

        def leave(_: Any) -> trio.lowlevel.Abort:
            waiting.is_parked = False
            # Otherwise locks that the worker holds for this call would not be released.
            self._channel.send_or_queue([_CONTROL, waiting.number])
            return trio.lowlevel.Abort.SUCCEEDED

        waiting.is_parked = True
        await trio.lowlevel.wait_task_rescheduled(leave)


async def _send_message(channel: MessageChannel, message: list[Any]) -> None:
    """Send a message, whose last member may be packed; raises as :meth:`MessageChannel.send`."""
    *head, value = message
    if isinstance(value, PackedMessage):
        packet = encode_packed([*head, value.head], value.buffers)
        if packet is not None:
            await channel.send_packet(packet)
            return
        # Too large for one packet: sent as ordinary bytes.
        value = [*value.head, b"".join(value.buffers)]
    await channel.send([*head, value])


# Server and calls

_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_LEAVE_SECONDS: Final = 5.0

WorkerRpcHandler = Callable[[Any], Awaitable[Any]]


class WorkerRpc:
    """RPC server and client of one worker.

    Args:
        secret: shared by all workers; part of the socket addresses.
        service: name of the calls that the server takes.
    """

    def __init__(self, secret: str, rows: int, row: int, service: str = "rpc") -> None:
        self.rows = rows
        self.row = row
        self._service = service
        self._prefix = f"\0ovmstrio-{secret}-{service}"
        self._others = [other for other in range(rows) if other != row]
        self._nursery: trio.Nursery | None = None
        self._links: dict[int, _PeerLink] = {}
        self._turns = {other: trio.StrictFIFOLock() for other in self._others}
        self._changed = trio.Event()
        self._accepting = trio.CancelScope()
        self._is_leaving = False
        self._connections: set[_ServerConnection] = set()

    def _address(self, row: int) -> str:
        # An abstract socket name is free as soon as its process has ended.
        return f"{self._prefix}-{row}"

    async def run(
        self,
        answer: WorkerRpcHandler,
        *,
        wait_usable: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run the RPC server and own client connections until cancelled.

        Args:
            answer: handles a call; server errors are returned to the caller.
            wait_usable: returns when calls can be handled; until then others cannot connect.
            task_status: reports that calls are accepted.

        Raises:
            OSError: the address is in use.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await wait_usable()
                with close_on_fork(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as end:
                    listener = trio.socket.from_stdlib_socket(end)
                    await listener.bind(self._address(self.row))
                    listener.listen(_BACKLOG)
                    task_status.started()
                    with self._accepting:
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
            if _is_same_user(accepted) and not self._is_leaving:
                channel = MessageChannel(_detached(accepted))
                connection = _ServerConnection(channel, answer)
                # A caller sends calls only after READY, so none is lost when this server leaves.
                channel.send_or_queue([_CONTROL, _READY, None])
                self._connections.add(connection)
                nursery.start_soon(self._serve_connection, connection)
            else:
                accepted.close()

    async def _serve_connection(self, connection: _ServerConnection) -> None:
        try:
            async with trio.open_nursery() as connection.nursery:
                connection.nursery.start_soon(self._receive_calls, connection)
        finally:
            connection.channel.close()
            self._connections.discard(connection)
            self.announce()

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
            number, value = message.value
            if message.tail is not None:
                value.append(message.tail)
            if number != _CONTROL:
                call = connection.calls[number] = _RunningCall(number, value)
                return call
            if value is None:
                connection.is_finished = True
                self.announce()
            elif value in connection.calls:
                connection.calls[value].scope.cancel()
            del message, value
        return None

    async def _handle_call(self, connection: _ServerConnection, call: _RunningCall) -> None:
        channel = connection.channel
        try:
            with call.scope:
                try:
                    value = await self._send_parts(channel, call, await connection.answer(call.value))
                    reply = [call.number, _ANSWERED, value]
                except Exception as error:  # noqa: BLE001 - raised in the caller
                    reply = [call.number, _FAILED, encode_error(error)]
                with suppress(trio.BrokenResourceError):
                    try:
                        await _send_message(channel, reply)
                    except (TypeError, ValueError, OSError) as error:
                        await channel.send([call.number, _FAILED, encode_error(error)])
        finally:
            del connection.calls[call.number]
            if self._is_leaving:
                self.announce()

    async def _send_parts(self, channel: MessageChannel, call: _RunningCall, reply: Any) -> Any:
        """Send the parts of a streamed result; return other results."""
        if not isinstance(reply, StreamedResult):
            return reply
        try:
            async for part in reply:
                await channel.send([call.number, _PART, part])
        except trio.BrokenResourceError:
            pass
        finally:
            reply.close()
        return None

    def announce(self) -> None:
        """Wake tasks in :meth:`wait_change`."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_change(self) -> None:
        """Wait until another worker has started, exited, or changed its readiness."""
        await self._changed.wait()

    async def leave(self, seconds: float = _LEAVE_SECONDS) -> None:
        """Take no more calls, and wait for at most ``seconds`` for those that have been sent."""
        self._is_leaving = True
        self._accepting.cancel()
        for connection in self._connections:
            connection.channel.send_or_queue([_CONTROL, _GOAWAY, None])
        with trio.move_on_after(seconds):
            while not all(each.is_finished and not each.calls for each in self._connections):
                await self._changed.wait()

    async def call(self, row: int, value: Any, *, wait_seconds: float | None = None) -> Any:
        """Call another worker.

        Args:
            row: index of the worker.
            value: plain data and arrays.
            wait_seconds: time limit for reaching a worker that is restarting, not for the result; None does not wait.

        Raises:
            PeerUnreachable: the worker cannot be reached, without ``wait_seconds``.
            WorkerRestarting: the worker cannot be reached within ``wait_seconds``.
            NotReady: the worker exited.
            Exception: the call failed there.
        """
        link = self._links.get(row)
        waiting = None
        if isinstance(value, PackedMessage) and link is not None and link.is_open and not self._turns[row].locked():
            waiting = link.send_now(value)
        if link is None or waiting is None:
            link, waiting = await self._send(row, value, wait_seconds)
        return await link.wait(waiting)

    async def listen(self, row: int, value: Any, on_message: Callable[[Any], None]) -> Any:
        """Call another worker for a streamed result, and return the final value; raises as :meth:`call`.

        Args:
            row: index of the worker.
            value: the call.
            on_message: is called with each part; must not block.
        """
        link, waiting = await self._send(row, value, None, on_message)
        return await link.wait(waiting)

    async def _send(
        self, row: int, value: Any, wait_seconds: float | None, on_message: Callable[[Any], None] | None = None
    ) -> tuple[_PeerLink, _PendingCall]:
        deadline = math.inf if wait_seconds is None else trio.current_time() + wait_seconds
        with trio.CancelScope(deadline=deadline):
            async with self._turns[row]:
                while True:
                    try:
                        link = await self._connect(row)
                        return link, await link.send(value, on_message)
                    except PeerUnreachable:
                        if wait_seconds is None:
                            raise
                    await trio.sleep(_POLL_SECONDS)
        raise WorkerRestarting(f"{_RESTARTING} (worker {row} was not ready within {wait_seconds:g} s)")

    async def _connect(self, row: int) -> _PeerLink:
        """Return the connection to a worker, opened if necessary; requires the worker's lock."""
        known = self._links.get(row)
        if known is not None:
            if known.is_open:
                return known
            await known.acknowledge()
        if self._nursery is None:
            raise NotReady("the server is shutting down")
        try:
            end = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise PeerUnreachable(f"the responsible worker cannot be called now: {error.strerror}") from None
        try:
            await end.connect(self._address(row))
        except OSError:
            end.close()
            raise PeerUnreachable(_RESTARTING) from None
        except BaseException:
            end.close()
            raise
        # Any process can bind a free abstract address.
        is_same_user = _is_same_user(end)
        channel = MessageChannel(_detached(end))
        try:
            is_greeted = is_same_user and await channel.receive() is not None
        except MALFORMED_MESSAGE_ERRORS:
            is_greeted = False
        except BaseException:
            channel.close()
            raise
        if not is_greeted or self._nursery is None:
            channel.close()
            raise PeerUnreachable(_RESTARTING)
        link = self._links[row] = _PeerLink(channel, partial(self._acknowledge_soon, row), partial(self._log_lost, row))
        self._nursery.start_soon(link.run)
        return link

    def _log_lost(self, row: int, count: int) -> None:
        log.error("calls to worker lost", other=row, service=self._service, count=count)

    def _acknowledge_soon(self, row: int, link: _PeerLink) -> None:
        async def acknowledge() -> None:
            # Calls that are being sent precede the acknowledgement.
            async with self._turns[row]:
                await link.acknowledge()

        if self._nursery is not None:
            self._nursery.start_soon(acknowledge)

    # Calls of several workers

    async def call_all(self, method: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Call all reachable workers and return their results.

        Raises:
            NotReady: a worker timed out.
            Exception: a call failed; all failures are logged.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        silent = set(self._others)

        async def call_one(row: int) -> None:
            try:
                answers[row] = await self.call(row, [method, *arguments])
            except PeerGone:
                pass  # Not running: it starts with the current state.
            except Exception as error:  # noqa: BLE001 - raised below, after all results
                errors[row] = error
            silent.discard(row)

        with trio.move_on_after(limit_seconds) as scope:
            async with trio.open_nursery() as nursery:
                for row in self._others:
                    nursery.start_soon(call_one, row)
        if scope.cancelled_caught:
            rows = ", ".join(map(str, sorted(silent)))
            raise NotReady(f"workers {rows} of {self.rows} timed out after {limit_seconds:g} s")
        for row, error in errors.items():
            log.warning("worker RPC failed", other=row, method=method, reason=str(error))
        for row, error in errors.items():
            if isinstance(error, ServerError):
                error.message = f"worker {row}: {error.message}"
                error.args = (error.message,)
            raise error
        return list(answers.values())

    async def call_within(self, calls: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Call workers, return results that arrive in time; see :class:`ovmstrio.core.worker_peers.WorkerPeers`."""
        answers: dict[int, Any] = {}

        async def call_one(row: int, method: Sequence[Any]) -> None:
            try:
                answers[row] = await self.call(row, list(method))
            except NotReady:
                pass  # Not running.
            except Exception as error:  # noqa: BLE001 - other results are still needed
                log.warning("worker RPC failed", other=row, method=method[0], reason=str(error))

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for row, method in calls.items():
                    nursery.start_soon(call_one, row, method)
        return answers


class _ServerConnection:
    """Connection of a calling worker.

    Attributes:
        nursery: tasks that receive and handle calls.
        calls: running calls by number.
        task: number of the receiving task.
        is_finished: the caller sends no more calls.
    """

    __slots__ = ("answer", "calls", "channel", "is_finished", "nursery", "task")

    def __init__(self, channel: MessageChannel, answer: WorkerRpcHandler) -> None:
        self.channel = channel
        self.nursery: trio.Nursery
        self.answer = answer
        self.calls: dict[int, _RunningCall] = {}
        self.task = 0
        self.is_finished = False


class _RunningCall:
    __slots__ = ("number", "scope", "value")

    def __init__(self, number: int, value: Any) -> None:
        self.number = number
        self.value = value
        self.scope = trio.CancelScope()


def _detached(taken: trio.socket.SocketType) -> socket.socket:
    return close_on_fork(socket.socket(fileno=taken.detach()))


def _is_same_user(end: trio.socket.SocketType) -> bool:
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return bool(user == os.geteuid())
