"""Worker process as seen by the server: program, start, requests, output, limits and exit."""

from __future__ import annotations

import codecs
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
import trio

from ovmstrio.core.events import current_event
from ovmstrio.core.resource_registry import current_owner, current_resource_registry
from ovmstrio.core.service import SampledThreads, notify_readiness_changed
from ovmstrio.core.tracing import current_span
from ovmstrio.isolation.channel import MessageChannel, packet_pair
from ovmstrio.isolation.exit_status import EXIT_DESCRIPTIONS
from ovmstrio.isolation.messages import MALFORMED_MESSAGE_ERRORS, Message
from ovmstrio.isolation.print_capture import log_forwarded_record, log_printed_line
from ovmstrio.isolation.side_messages import LOG_LEVELS, LOG_RECORD, SAMPLING_REQUEST, decode_samples
from ovmstrio.isolation.trace_propagation import REQUEST_ID
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.stdio import StreamName, split_lines

# ----------------------------------------------------------------------
# Programs and exit descriptions
# ----------------------------------------------------------------------

_ROOT: Final = Path(__file__).parents[2]
_RUNNER: Final = "ovmstrio.isolation.program"


class Program(NamedTuple):
    """Program of a worker process.

    Attributes:
        module: run as a program. Arguments: descriptor of its socket, descriptor of the parent-watch pipe.
        python: interpreter; None for the server's. Another interpreter runs the module by path.
    """

    module: str
    python: Path | None = None

    def command(self, end: int, lifeline: int) -> list[str]:
        """Return the command line."""
        numbers = [str(end), str(lifeline)]
        if self.python is None:
            # Without -P, modules of the current directory would shadow the server's.
            return [sys.executable, "-P", "-m", _RUNNER, self.module, *numbers]
        file = _ROOT.joinpath(*self.module.split(".")).with_suffix(".py")
        return [str(self.python), str(file), *numbers]

    def environment(self) -> dict[str, str] | None:
        """Return the environment, with PYTHONPATH if the server is not installed; None to inherit."""
        if self.python is not None:
            # These variables are meant for the server's interpreter.
            return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
        if _ROOT.name in {"site-packages", "dist-packages"}:
            return None
        search_path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": search_path}


async def start_program(
    program: Program,
    program_socket: socket.socket,
    parent_watch: int,
    *,
    captures_output: bool = False,
) -> trio.Process:
    """Start a program in a separate process group, which signals of the terminal do not reach.

    The caller owns the process and its pipes, and keeps the files. Raises ``OSError``.

    Args:
        program: the program.
        program_socket: socket for the program.
        parent_watch: read end of the parent-watch pipe.
        captures_output: create pipes for stdout and stderr instead of inheriting them.
    """
    output = subprocess.PIPE if captures_output else None
    return await trio.lowlevel.open_process(
        program.command(program_socket.fileno(), parent_watch),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(program_socket.fileno(), parent_watch),
        env=program.environment(),
        process_group=0,
    )


def describe_exit_status(status: int) -> str:
    """Return a description of an exit status; negative for a signal."""
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    meaning = EXIT_DESCRIPTIONS.get(status)
    return f"ended with status {status}" + ("" if meaning is None else f" ({meaning})")


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def describe_probe_exit(code: int) -> str:
    """Return a description of an exit code for a probe; negative for a signal."""
    if code < 0:
        return f"crashed with {signal_name(-code)}"
    return f"ended the process with exit code {code}"


# ----------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------

# -- Output ------------------------------------------------------------------------------------------------------------

_READ_BYTES: Final = 4096
_LINES_PER_CHECKPOINT: Final = 32
_DRAIN_SECONDS: Final = 0.5
"""Time to read remaining output after the block; processes started by the process may keep the pipes open."""


@asynccontextmanager
async def log_output(process: trio.Process, names: Mapping[str, str]) -> AsyncIterator[None]:
    """Log the output of a process during the block, and the rest afterwards; closes the pipes.

    A process that prints faster than its lines are logged is blocked.
    """
    pipes: tuple[tuple[StreamName, trio.abc.ReceiveStream | None], ...] = (
        ("stdout", process.stdout),
        ("stderr", process.stderr),
    )
    async with trio.open_nursery() as nursery:
        for name, pipe in pipes:
            if pipe is not None:
                nursery.start_soon(_log_lines, pipe, name, names)
        yield
        nursery.cancel_scope.deadline = trio.current_time() + _DRAIN_SECONDS


async def _log_lines(pipe: trio.abc.ReceiveStream, name: StreamName, names: Mapping[str, str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    partial_line = ""
    async with pipe:
        try:
            while data := await pipe.receive_some(_READ_BYTES):
                lines, partial_line = split_lines(partial_line, decoder.decode(data))
                for number, line in enumerate(lines, 1):
                    log_printed_line(line, name, names)
                    if not number % _LINES_PER_CHECKPOINT:
                        await trio.lowlevel.checkpoint()
        finally:
            for line in split_lines(partial_line, "\n")[0]:
                log_printed_line(line, name, names)


# -- Process -----------------------------------------------------------------------------------------------------------

_EXIT_SECONDS: Final = 2.0
"""Time for a process that has closed its channel to exit by itself, so that its own exit status is reported."""

_NO_ANSWER_EXPECTED: Final = 0

_SAMPLE_GRACE_SECONDS: Final = 5.0
"""Time that a process may take to return stack samples, in addition to the sampling time."""

_STOPPED_SECONDS: Final = 20.0
_STOPPED_CHECKS: Final = 4
"""Number of consecutive checks that find a process stopped before it is killed."""

_MEMORY_CHECK_SECONDS: Final = 0.05


class WorkerExited(Exception):
    """The worker process has exited or takes no more requests; ``was_called`` tells whether it received the request."""

    def __init__(self, reason: str, *, was_called: bool) -> None:
        super().__init__(reason)
        self.why = reason or "has ended"
        self.was_called = was_called


class _PendingAnswer:
    __slots__ = ("done", "is_abandoned", "is_answered", "value", "was_sent")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.value: Any = None
        self.was_sent = False
        self.is_answered = False
        self.is_abandoned = False


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; a process stopped by a debugger does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


async def _nothing() -> None:
    pass


def call_headers() -> dict[str, str]:
    """Return headers that identify the current call in a worker process: request id and trace; may be empty."""
    span, event = current_span.get(), current_event.get()
    headers = {} if span is None else dict(span.headers())
    if event is not None and event.request_id:
        headers[REQUEST_ID] = event.request_id
    return headers


class WorkerProcess:
    """One process, which runs a program that answers requests as in :func:`run_program`.

    Args:
        module: the program; see :class:`Program`, also for ``python``.
        max_concurrent_calls: maximum number of concurrent requests; further ones wait.
        grace_seconds: how long a request may run after its caller was cancelled. Then the process takes no more
            requests, and is killed as soon as no caller waits.
        kill_delay_seconds: maximum time until the kill in that case.
        on_stuck: called in that case.
        sends_cancel: send ``["cancel", number]`` for requests of cancelled callers.
        memory_limit: resident bytes above which the process is killed; 0 for no limit.
        stopped_seconds: how long the process may be stopped, as by SIGSTOP, before it is killed. Time in which the
            server was stopped too does not count.
        kills_group: kill the remaining members of the process group at exit, such as forked children.
        log_fields: fields of the process's output and log records; without them the process shares the server's output
            and logs by itself.
        on_message: called on the event loop with unsolicited messages; must not block.
        on_drained: called on the event loop after the messages that have arrived together; must not block.

    Attributes:
        is_retired: takes no more requests.
        ended: set when the process has exited and all callers were notified.
        why: reason of the exit.
        status: exit status; negative for a signal.
    """

    def __init__(
        self,
        module: str,
        *,
        python: Path | None = None,
        max_concurrent_calls: int = 1,
        grace_seconds: float = math.inf,
        kill_delay_seconds: float = math.inf,
        sends_cancel: bool = False,
        memory_limit: int = 0,
        stopped_seconds: float = _STOPPED_SECONDS,
        on_stuck: Callable[[], None] = lambda: None,
        kills_group: bool = False,
        log_fields: Mapping[str, str] | None = None,
        on_message: Callable[[Any], None] | None = None,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        self._heard = on_message
        self._on_drained = on_drained
        self._names = log_fields
        self._owner = current_owner.get()
        self.is_retired = False
        self.ended = trio.Event()
        self.why = ""
        self.status: int | None = None
        self._program = Program(module, python)
        self._grace_seconds = grace_seconds
        self._spare_seconds = kill_delay_seconds
        self._sends_cancel = sends_cancel
        self._memory_limit = memory_limit
        self._stopped_seconds = stopped_seconds
        self._stuck = on_stuck
        self._is_stuck = False
        self._ends_group = kills_group
        self._limiter = trio.CapacityLimiter(max_concurrent_calls)
        self._numbers = itertools.count(_NO_ANSWER_EXPECTED + 1)
        self._pending: dict[int, _PendingAnswer] = {}
        self._samples: dict[int, _PendingAnswer] = {}
        self._process: trio.Process | None = None
        self._channel: MessageChannel | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def pid(self) -> int | None:
        """Process id."""
        return None if self._process is None else self._process.pid

    @property
    def load(self) -> int:
        """Number of requests, waiting ones included."""
        return len(self._pending) + self._limiter.statistics().tasks_waiting

    @property
    def is_busy(self) -> bool:
        """True if a request is running, including requests of cancelled callers."""
        return bool(self._pending)

    async def idle(self) -> None:
        """Wait until no request is running."""
        while self._pending:
            await next(iter(self._pending.values())).done.wait()

    # -- Life cycle ----------------------------------------------------------------------------------------------------

    async def start(
        self,
        nursery: trio.Nursery,
        first: Any,
        *,
        descriptor: int | None = None,
        on_exit: Callable[[], Awaitable[None]] = _nothing,
    ) -> Any:
        """Start the process and return the answer to its first request. Cancellation kills the process.

        Args:
            nursery: runs the process.
            first: first request.
            descriptor: file descriptor sent with it.
            on_exit: called in the nursery after the exit, unless that was caused by cancellation.

        Raises:
            OSError: the process cannot be started.
            WorkerExited: the process exited before it answered.
        """
        await nursery.start(self._run_process, on_exit)
        self._send_log_levels()
        try:
            return await self.call(first, descriptor)
        except BaseException:
            self.kill()
            raise

    async def _run_process(self, on_exit: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None]) -> None:
        try:
            lifeline, kept_open = os.pipe()
            try:
                server_socket, program_socket = packet_pair()
            except OSError:
                os.close(lifeline)
                os.close(kept_open)
                raise
        except OSError:
            self.is_retired = True
            self.ended.set()
            raise
        channel = self._channel = MessageChannel(server_socket)
        try:
            try:
                with program_socket:
                    process = await start_program(
                        self._program,
                        program_socket,
                        lifeline,
                        captures_output=self._names is not None,
                    )
                self._process = process
            finally:
                os.close(lifeline)
            task_status.started()
            with current_resource_registry().process(self, self._owner), LOG_LEVEL.watched(self._send_log_levels):
                await self._run(process, channel)
            if not self.is_retired or self.why or self._is_stuck:
                current_resource_registry().ended[self._owner] += 1
        finally:
            self.is_retired = True
            with trio.CancelScope(shield=True):
                await self._kill_and_wait()
            os.close(kept_open)
            channel.close()
            for number in list(self._pending):
                self._finish_request(number)
            for samples in self._samples.values():
                samples.done.set()
            self.ended.set()
        await on_exit()

    def _send_log_levels(self) -> None:
        if self._channel is not None and self._names is not None:
            self._channel.send_or_queue([LOG_LEVELS, LOG_LEVEL.levels()])

    async def _run(self, process: trio.Process, channel: MessageChannel) -> None:
        async with log_output(process, self._names or {}), trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._wait_for_end, process, channel)
            if self._memory_limit:
                nursery.start_soon(self._watch_memory, process.pid)
            if self._stopped_seconds != math.inf:
                nursery.start_soon(self._watch_stops, process.pid)
            await self._receive_all(channel)
            with trio.move_on_after(_EXIT_SECONDS):
                await process.wait()
            nursery.cancel_scope.cancel()

    async def _wait_for_end(self, process: trio.Process, channel: MessageChannel) -> None:
        try:
            await process.wait()
            channel.end()
        finally:
            # Tasks must not be started any more: the nursery closes before its parent task runs again.
            self._nursery = None

    async def _watch_memory(self, pid: int) -> None:
        file, page = Path(f"/proc/{pid}/statm"), os.sysconf("SC_PAGE_SIZE")
        while True:
            try:
                resident = int(file.read_bytes().split()[1]) * page  # noqa: ASYNC240 - procfs needs no disk
            except (OSError, IndexError):
                return
            if resident > self._memory_limit:
                self.why = f"was killed because it used {resident} bytes of memory; its limit is {self._memory_limit}"
                self.kill()
                return
            await trio.sleep(_MEMORY_CHECK_SECONDS)

    async def _watch_stops(self, pid: int) -> None:
        """Kill the process when it has been stopped for too long.

        The state is read from the kernel, because a process that computes in C with the GIL does not answer either.
        """
        interval = self._stopped_seconds / _STOPPED_CHECKS
        checks, last = 0, trio.current_time()
        while checks < _STOPPED_CHECKS:
            await trio.sleep(interval)
            # A late check means that the server was stopped itself, maybe together with the process.
            is_late, last = trio.current_time() - last > 2 * interval, trio.current_time()
            checks = checks + 1 if _is_stopped(pid) and not is_late else 0
        self.why = f"was stopped (SIGSTOP) for {self._stopped_seconds:g} s and was killed"
        self.kill()

    async def _receive_all(self, channel: MessageChannel) -> None:
        try:
            while (message := await channel.receive(self._on_drained)) is not None:
                self._take(message)
                # Otherwise this frame would keep the message alive until the next one.
                del message
        except MALFORMED_MESSAGE_ERRORS as error:
            self.kill_for_violation(error)

    def _take(self, message: Message) -> None:
        """Deliver a message; raise ``MALFORMED_MESSAGE_ERRORS`` exceptions if it is malformed."""
        if message.descriptor is not None:
            os.close(message.descriptor)
        number, value = message.value
        if number == _NO_ANSWER_EXPECTED and self._heard is not None:
            self._heard(value)
            return
        if number == SAMPLING_REQUEST:
            self._take_samples(*value)
            return
        if number == LOG_RECORD:
            log_forwarded_record(value, self._names or {})
            return
        pending = self._pending[number]
        if not pending.is_abandoned:
            pending.value = value
        pending.is_answered = True
        self._finish_request(number)

    def _take_samples(self, number: int, value: Any) -> None:
        """Deliver stack samples, unless their request has timed out."""
        pending = self._samples.get(number)
        if pending is not None:
            pending.value, pending.is_answered = value, True
            pending.done.set()

    async def _kill_and_wait(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.status = await self._process.wait()
            if self._ends_group:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self.why = self.why or describe_exit_status(self.status)

    def kill_for_violation(self, error: Exception) -> None:
        """Kill a process that sent an invalid message."""
        self.why = f"sent an invalid message ({error!r}) and was killed"
        self.kill()

    def kill(self) -> None:
        """Kill the process."""
        self.is_retired = True
        if self._process is not None:
            self._process.kill()

    def finish(self) -> None:
        """Announce that no more requests will come, so that the process exits after its running requests."""
        self.is_retired = True
        if self._channel is not None:
            self._channel.finish()

    async def close(self, grace_seconds: float) -> None:
        """Finish the process and wait, shielded, for its exit; kill it after ``grace_seconds``."""
        self.finish()
        with trio.move_on_after(grace_seconds, shield=True):
            await self.ended.wait()
        self.kill()
        with trio.CancelScope(shield=True):
            await self.ended.wait()

    # -- Requests ------------------------------------------------------------------------------------------------------

    async def notify(self, value: Any, descriptor: int | None = None) -> None:
        """Send a message that has no answer, completely or not at all, with an optional file descriptor (copied).

        Raises:
            WorkerExited: the process takes no more.
            TypeError: the value cannot be sent.
            OSError: out of memory.
        """
        try:
            await self._send(_NO_ANSWER_EXPECTED, value, descriptor)
        except trio.BrokenResourceError:
            raise WorkerExited(self.why, was_called=False) from None

    def send_or_drop(self, value: Any) -> None:
        """Send a message that has no answer and may be dropped; raises ``TypeError`` if the value cannot be sent."""
        if self._channel is not None and not self.ended.is_set():
            self._channel.send_or_drop([_NO_ANSWER_EXPECTED, value])

    async def call(self, value: Any, descriptor: int | None = None, *, limit_seconds: float = math.inf) -> Any:
        """Send a request and return its answer; up to ``max_concurrent_calls`` run concurrently.

        After ``limit_seconds`` the process takes no more requests, as ``grace_seconds`` after a cancellation.

        Raises:
            WorkerExited: the process exited before it answered, timed out, or takes no more.
            TypeError: the value cannot be sent; nothing was sent.
            OSError: out of memory.
        """
        pending, number = _PendingAnswer(), next(self._numbers)
        try:
            self._limiter.acquire_on_behalf_of_nowait(pending)
        except trio.WouldBlock:
            await self._limiter.acquire_on_behalf_of(pending)
        self._pending[number] = pending
        if limit_seconds == math.inf:
            await self._send_request(pending, number, value, descriptor)
        else:
            with trio.move_on_after(limit_seconds) as scope:
                await self._send_request(pending, number, value, descriptor)
            if scope.cancelled_caught:
                self._retire_stuck(f"did not end within {limit_seconds:g} s")
                raise WorkerExited(self.why, was_called=True)
        if not pending.is_answered:
            raise WorkerExited(self.why, was_called=pending.was_sent)
        return pending.value

    async def sample(self, seconds: float, rate: float) -> list[SampledThreads]:
        """Sample the stacks of the threads for ``seconds`` at ``rate`` per second, concurrently with the requests.

        Raises:
            WorkerExited: the process has exited.
            TimeoutError: no answer: the process reads no messages, or its code holds the GIL.
            ValueError: the answer is malformed, or is an error of the process.
        """
        pending, number = _PendingAnswer(), next(self._numbers)
        self._samples[number] = pending
        try:
            with trio.move_on_after(seconds + _SAMPLE_GRACE_SECONDS):
                await self._send(SAMPLING_REQUEST, [number, seconds, rate], None)
                await pending.done.wait()
        except trio.BrokenResourceError:
            raise WorkerExited(self.why, was_called=False) from None
        finally:
            del self._samples[number]
        if not pending.done.is_set():
            raise TimeoutError("its threads could not be sampled: its code holds the GIL, or it was starting")
        if not pending.is_answered:
            raise WorkerExited(self.why, was_called=False)
        return decode_samples(pending.value)

    async def _send_request(self, pending: _PendingAnswer, number: int, value: Any, descriptor: int | None) -> None:
        pending.was_sent = True
        try:
            await self._send(number, value, descriptor)
        except trio.BrokenResourceError:
            pending.was_sent = False
        except BaseException:
            self._finish_request(number)
            raise
        try:
            await pending.done.wait()
        except trio.Cancelled:
            self._abandon(pending, number)
            raise

    async def _send(self, number: int, value: Any, descriptor: int | None) -> None:
        if self.is_retired or self._channel is None:
            raise WorkerExited(self.why, was_called=False)
        await self._channel.send([number, value], descriptor)

    def _finish_request(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._limiter.release_on_behalf_of(pending)
            pending.done.set()
            self._kill_if_unneeded()

    def _abandon(self, pending: _PendingAnswer, number: int) -> None:
        pending.is_abandoned = True
        pending.value = None
        if self._sends_cancel:
            self.send_or_drop(["cancel", number])
        if self._nursery is not None and not pending.done.is_set():
            self._nursery.start_soon(self._watch_abandoned, pending)
        self._kill_if_unneeded()

    async def _watch_abandoned(self, pending: _PendingAnswer) -> None:
        """Retire the process if a request of a cancelled caller does not end."""
        with trio.move_on_after(self._grace_seconds):
            await pending.done.wait()
            return
        self._retire_stuck(f"did not end within {self._grace_seconds:g} s after its caller left")

    def _retire_stuck(self, what: str) -> None:
        """Retire the process because of a call that does not end."""
        if self._is_stuck:
            return
        self.why = f"was killed because a call {what}"
        self.is_retired = self._is_stuck = True
        self._stuck()
        self._kill_if_unneeded()
        if self._nursery is not None and self._spare_seconds != math.inf:
            self._nursery.start_soon(self._kill_later)

    async def _kill_later(self) -> None:
        await trio.sleep(self._spare_seconds)
        self.kill()

    def _kill_if_unneeded(self) -> None:
        if self._is_stuck and all(pending.is_abandoned for pending in self._pending.values()):
            self.kill()


# -- Restarted processes -----------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)


class RestartedProcess:
    """Slot of a worker process that is restarted after its exit.

    Args:
        row: index of the slot.
        make: creates a process, which is then started.
        first: first request of each process.
        descriptor: file descriptor sent with it.
        prepare: called with the process and its first answer; returns whether the process can be used, else it is
            killed.
        cannot_start: called with the start error, after which the start is retried; without it :meth:`keep` raises.
        backoff: restart delays.
        stopping: stops restarting once set.
        changed: called when a process has become ready and when it has exited.
        ended: called after an exit; its exceptions end :meth:`keep`.

    Attributes:
        row: index of the slot.
        is_ready: the process has answered its first request.
        given: number of descriptors given to the process.
        process: the running process, or None.
        is_replaced: restart without delay after the next exit.
    """

    def __init__(
        self,
        row: int,
        make: Callable[[], WorkerProcess],
        first: Any,
        descriptor: int | None = None,
        *,
        prepare: Callable[[WorkerProcess, Any], Awaitable[bool]] | None = None,
        cannot_start: Callable[[OSError], None] | None = None,
        backoff: Backoff,
        stopping: trio.Event,
        changed: Callable[[], object],
        ended: Callable[[RestartedProcess, WorkerProcess], None],
    ) -> None:
        self.row = row
        self.is_ready = False
        self.given = 0
        self.process: WorkerProcess | None = None
        self._make = make
        self._prepare = prepare
        self._cannot_start = cannot_start
        self._first = first
        self._descriptor = descriptor
        self._backoff = backoff
        self._stopping = stopping
        self._changed = changed
        self._ended = ended
        self.is_replaced = False

    async def keep(self) -> None:
        """Run and restart processes until ``stopping`` is set; raises ``OSError`` if none can be started."""
        while not self._stopping.is_set():
            started = trio.current_time()
            has_started = await self._run_one()
            if self._stopping.is_set():
                return
            if self.is_replaced and has_started:
                continue
            seconds = self._backoff.seconds_after(trio.current_time() - started)
            log.warning("worker process restarting", row=self.row, seconds=seconds)
            with trio.move_on_after(seconds):
                await self._stopping.wait()

    async def _run_one(self) -> bool:
        """Run a process until its exit; return False if it could not be started."""
        process = self.process = self._make()
        self.given = 0
        try:
            async with trio.open_nursery() as nursery:
                try:
                    answer = await process.start(nursery, self._first, descriptor=self._descriptor)
                    self.is_ready = self._prepare is None or await self._prepare(process, answer)
                except WorkerExited:
                    self.is_ready = False
                except OSError as error:
                    if self._cannot_start is None:
                        raise
                    self._cannot_start(error)
                    return False
                if self.is_ready:
                    self._notify_change()
                else:
                    process.kill()
            self._ended(self, process)
            return True
        finally:
            self.process = None
            self.is_ready = False
            self._notify_change()

    def _notify_change(self) -> None:
        self._changed()
        notify_readiness_changed()

    async def give(self, value: Any, descriptor: int) -> bool:
        """Send a message with a file descriptor (copied); return whether the process took it."""
        if self.process is not None:
            self.given += 1
            try:
                await self.process.notify(value, descriptor)
            except WorkerExited:
                self.is_ready = False
            else:
                return True
        return False

    async def notify(self, value: Any) -> None:
        """Send a message, if the process is ready."""
        if self.process is not None and self.is_ready:
            with suppress(WorkerExited):
                await self.process.notify(value)

    def dismiss(self) -> None:
        """Finish the process; kill one that is not ready, which has no requests and may take long to start."""
        if self.process is not None:
            (self.process.finish if self.is_ready else self.process.kill)()
