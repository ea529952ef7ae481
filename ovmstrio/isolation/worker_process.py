"""A worker process, as the server sees it: what it has been asked, and how it came to its end."""

from __future__ import annotations

import codecs
import itertools
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.resource_registry import current_census, current_owner
from ovmstrio.core.service import SampledThreads, readiness_may_have_changed
from ovmstrio.isolation.channel import NO_MESSAGE, Message, MessageChannel, packet_pair
from ovmstrio.isolation.printing import log_printed
from ovmstrio.isolation.program import Program, describe_end, start_program
from ovmstrio.isolation.stack_requests import SAMPLES, decode_samples
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.stdio import StreamName, whole_lines

__all__ = ["KeptProcess", "WorkerEnded", "WorkerProcess", "output_logged"]

# ----------------------------------------------------------------------
# What a worker process prints, by whatever means, as lines of the server's log
# ----------------------------------------------------------------------

_AT_ONCE: Final = 4096
_LINES_AT_ONCE: Final = 32
_REST_SECONDS: Final = 0.5
"""How long what a process has printed before its end is waited for; what it has started may keep its pipes open."""


@asynccontextmanager
async def output_logged(process: trio.Process, names: Mapping[str, str]) -> AsyncIterator[None]:
    """Log what a process prints while the block runs, and what is left in its pipes then.

    A process that prints faster than its lines are logged waits.

    Raises:
        ExceptionGroup: of what the block raises.

    Ownership: the process's ends of both pipes.

    Cancellation: at once.
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
        nursery.cancel_scope.deadline = trio.current_time() + _REST_SECONDS


async def _log_lines(pipe: trio.abc.ReceiveStream, name: StreamName, names: Mapping[str, str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begun = ""
    async with pipe:
        try:
            while data := await pipe.receive_some(_AT_ONCE):
                lines, begun = whole_lines(begun, decoder.decode(data))
                for number, line in enumerate(lines, 1):
                    log_printed(line, name, names)
                    if not number % _LINES_AT_ONCE:
                        await trio.lowlevel.checkpoint()
        finally:
            for line in whole_lines(begun, "\n")[0]:
                log_printed(line, name, names)


# ----------------------------------------------------------------------
# A worker process, as the server sees it: what it has been asked, and how it came to its end
# ----------------------------------------------------------------------

_SECONDS_TO_DIE: Final = 2.0
"""How long a process whose end of the channel is gone gets to end by itself, so that its own status is seen."""

_NO_ANSWER_EXPECTED: Final = 0

_SECONDS_TO_TELL: Final = 5.0
"""How much longer than it was asked to look a process may take to tell what it has seen."""

_STOPPED_SECONDS: Final = 20.0
_LOOKS_AT_STOPPED: Final = 4
"""How often in succession a process is seen stopped before it is killed."""

_SECONDS_BETWEEN_LOOKS: Final = 0.05
"""How often the memory of a process is looked at that has a limit."""


class WorkerEnded(Exception):
    """The worker process is gone, or is to take no more; ``was_called`` says whether it had got the request."""

    def __init__(self, why: str, *, was_called: bool) -> None:
        super().__init__(why)
        self.why = why or "has ended"
        self.was_called = was_called


class _PendingAnswer:
    """What a request is to be answered with, whether it has been, and whether anybody waits for it."""

    __slots__ = ("done", "is_abandoned", "is_answered", "value", "was_sent")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.value: Any = None
        self.was_sent = False
        self.is_answered = False
        self.is_abandoned = False


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; one that a debugger holds is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


async def _nothing() -> None:
    """Do nothing."""


class WorkerProcess:
    """One process, from its start to its end; it runs a program that answers requests, as :func:`run_program` does.

    Args:
        module: the program; see :class:`Program`, also for ``python``.
        calls_at_once: how many requests it has at most; others wait.
        grace_seconds: how long a request may go on whose caller has left.  After that the process takes no more, and is
            killed as soon as nobody waits for any other request.
        spare_seconds: how long the other requests have then until the process is killed all the same.
        stuck: is called when that happens.
        tells_of_leaving: whether the program is told of requests whose callers have left, as ``["cancel", number]``.
        memory_limit: how many bytes of memory the process may have; 0 for any number.  It is killed above that.
        stopped_seconds: how long the process may be stopped, as by SIGSTOP, until it is killed.  Time in which this
            process was stopped as well does not count.
        own_group: as for :func:`start_program`.
        ends_group: whether what is left of its own group when it has ended, such as what it has forked, is killed.
        names: say in the log whose code prints there; without them what it prints goes where the server's goes.
        heard: is called on the event loop with what the program tells without having been asked, and must not wait.

    Attributes:
        is_retired: whether it takes no more requests, because it has ended or is to end.
        ended: set when the process is gone, and everybody who waited for it has been told.
        why: how it ended, in words.
        status: how it ended, below 0 for a signal.
    """

    def __init__(
        self,
        module: str,
        *,
        python: Path | None = None,
        calls_at_once: int = 1,
        grace_seconds: float = math.inf,
        spare_seconds: float = math.inf,
        tells_of_leaving: bool = False,
        memory_limit: int = 0,
        stopped_seconds: float = _STOPPED_SECONDS,
        stuck: Callable[[], None] = lambda: None,
        own_group: bool = False,
        ends_group: bool = False,
        names: Mapping[str, str] | None = None,
        heard: Callable[[Any], None] | None = None,
    ) -> None:
        self._heard = heard
        self._names = names
        self._owner = current_owner.get()
        self.is_retired = False
        self.ended = trio.Event()
        self.why = ""
        self.status: int | None = None
        self._program = Program(module, python)
        self._grace_seconds = grace_seconds
        self._spare_seconds = spare_seconds
        self._tells_of_leaving = tells_of_leaving
        self._memory_limit = memory_limit
        self._stopped_seconds = stopped_seconds
        self._stuck = stuck
        self._is_stuck = False
        self._own_group = own_group or ends_group
        self._ends_group = ends_group
        self._limiter = trio.CapacityLimiter(calls_at_once)
        self._numbers = itertools.count(_NO_ANSWER_EXPECTED + 1)
        self._pending: dict[int, _PendingAnswer] = {}
        self._samples: dict[int, _PendingAnswer] = {}
        self._process: trio.Process | None = None
        self._channel: MessageChannel | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return None if self._process is None else self._process.pid

    @property
    def load(self) -> int:
        """How many requests it has, with those that wait for others to be answered."""
        return len(self._pending) + self._limiter.statistics().tasks_waiting

    @property
    def is_busy(self) -> bool:
        """Whether it has a request, be it one that nobody waits for any more."""
        return bool(self._pending)

    async def idle(self) -> None:
        """Wait until it has no request any more.

        Cancellation: at once.
        """
        while self._pending:
            await next(iter(self._pending.values())).done.wait()

    # Life

    async def start(
        self,
        nursery: trio.Nursery,
        first: Any,
        *,
        descriptor: int | None = None,
        buried: Callable[[], Awaitable[None]] = _nothing,
    ) -> Any:
        """Start the process, and give what it answers to its first request.

        Args:
            nursery: hosts the process.
            first: what the process is for.
            descriptor: goes along.
            buried: is called in the nursery when the process has ended, unless that was because of cancellation.

        Raises:
            OSError: no process can be started.
            WorkerEnded: it ended before it answered.

        Ownership: the process belongs to a task of the nursery, whose cancellation kills it.

        Cancellation: at once; the process is killed.
        """
        await nursery.start(self._live, buried)
        try:
            return await self.call(first, descriptor)
        except BaseException:
            self.kill()
            raise

    async def _live(self, buried: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None]) -> None:
        """Be the process; never fails because of what it does.

        Raises:
            OSError: no process can be started.

        Cancellation: at once; the process is killed.
        """
        lifeline, kept_open = os.pipe()
        try:
            ours, theirs = packet_pair()
        except OSError:
            os.close(lifeline)
            os.close(kept_open)
            raise
        channel = self._channel = MessageChannel(ours)
        try:
            try:
                with theirs:
                    process = await start_program(
                        self._program, theirs, lifeline, own_group=self._own_group, is_heard=self._names is not None
                    )
                self._process = process
            finally:
                os.close(lifeline)
            task_status.started()
            with current_census().process(self, self._owner):
                await self._run(process, channel)
            if not self.is_retired or self.why or self._is_stuck:
                current_census().ended[self._owner] += 1
        finally:
            self.is_retired = True
            with trio.CancelScope(shield=True):
                await self._bury()
            os.close(kept_open)
            channel.close()
            for number in list(self._pending):
                self._settle(number)
            for samples in self._samples.values():
                samples.done.set()
            self.ended.set()
        await buried()

    async def _run(self, process: trio.Process, channel: MessageChannel) -> None:
        """Hear the process until it ends."""
        async with output_logged(process, self._names or {}), trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._wait_for_end, process, channel)
            if self._memory_limit:
                nursery.start_soon(self._watch_memory, process.pid)
            if self._stopped_seconds != math.inf:
                nursery.start_soon(self._watch_stops, process.pid)
            await self._receive_all(channel)
            with trio.move_on_after(_SECONDS_TO_DIE):
                await process.wait()
            nursery.cancel_scope.cancel()

    async def _wait_for_end(self, process: trio.Process, channel: MessageChannel) -> None:
        try:
            await process.wait()
            channel.end()
        finally:
            # The nursery takes no tasks once its last one has ended, which is before whoever opened it runs again.
            self._nursery = None

    async def _watch_memory(self, pid: int) -> None:
        """Kill the process when it has more memory than it may.

        Cancellation: at once.
        """
        file, page = Path(f"/proc/{pid}/statm"), os.sysconf("SC_PAGE_SIZE")
        while True:
            try:
                resident = int(file.read_bytes().split()[1]) * page  # noqa: ASYNC240 - no disk is behind it
            except (OSError, IndexError):
                return
            if resident > self._memory_limit:
                self.why = f"was killed because it had {resident} bytes of memory; its limit is {self._memory_limit}"
                self.kill()
                return
            await trio.sleep(_SECONDS_BETWEEN_LOOKS)

    async def _watch_stops(self, pid: int) -> None:
        """Kill the process when it has been stopped for too long.

        The state comes from the kernel: a process that computes for long in C, with the interpreter's lock, answers
        no more than one that is stopped.

        Cancellation: at once.
        """
        interval = self._stopped_seconds / _LOOKS_AT_STOPPED
        looks, last = 0, trio.current_time()
        while looks < _LOOKS_AT_STOPPED:
            await trio.sleep(interval)
            # A late look is that of a server that was stopped itself, maybe together with the process.
            is_late, last = trio.current_time() - last > 2 * interval, trio.current_time()
            looks = looks + 1 if _is_stopped(pid) and not is_late else 0
        self.why = f"was stopped (SIGSTOP) for {self._stopped_seconds:g} s and was killed"
        self.kill()

    async def _receive_all(self, channel: MessageChannel) -> None:
        try:
            while (message := await channel.receive()) is not None:
                self._take(message)
                # Its memory belongs to whoever waits for it, and not to this loop until the next one comes.
                del message
        except NO_MESSAGE as error:
            self.condemn(error)

    def _take(self, message: Message) -> None:
        """Hand an answer to whoever waits for it.

        Raises:
            ValueError, LookupError, TypeError: it is none.
        """
        if message.descriptor is not None:
            os.close(message.descriptor)
        number, value = message.value
        if number == _NO_ANSWER_EXPECTED and self._heard is not None:
            self._heard(value)
            return
        if number == SAMPLES:
            self._take_samples(*value)
            return
        pending = self._pending[number]
        if not pending.is_abandoned:
            pending.value = value
        pending.is_answered = True
        self._settle(number)

    def _take_samples(self, number: int, value: Any) -> None:
        """Hand samples to whoever still waits for them: a process may tell of them long after it was asked."""
        pending = self._samples.get(number)
        if pending is not None:
            pending.value, pending.is_answered = value, True
            pending.done.set()

    async def _bury(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.status = await self._process.wait()
            if self._ends_group:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self.why = self.why or describe_end(self.status)

    def condemn(self, error: Exception) -> None:
        """Kill a process that sends nonsense."""
        self.why = f"sent what is no answer ({error!r}) and was killed"
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self.is_retired = True
        if self._process is not None:
            self._process.kill()

    def finish(self) -> None:
        """Tell the process that nothing more will come, so that it ends when it has done what it was asked."""
        self.is_retired = True
        if self._channel is not None:
            self._channel.finish()

    async def close(self, grace_seconds: float) -> None:
        """Have the process finish, and wait for its end; it is killed if that takes too long.

        Cancellation: shielded, for it is bounded.
        """
        self.finish()
        with trio.move_on_after(grace_seconds, shield=True):
            await self.ended.wait()
        self.kill()
        with trio.CancelScope(shield=True):
            await self.ended.wait()

    # Requests

    async def tell(self, value: Any, descriptor: int | None = None) -> None:
        """Send what is not answered, and a copy of a descriptor with it.

        Raises:
            WorkerEnded: the process takes no more.
            TypeError: the value cannot be sent.
            OSError: there is no memory left.

        Cancellation: at once; it is sent as a whole or not at all.
        """
        try:
            await self._send(_NO_ANSWER_EXPECTED, value, descriptor)
        except trio.BrokenResourceError:
            raise WorkerEnded(self.why, was_called=False) from None

    def tell_soon(self, value: Any) -> None:
        """Send what is not answered and may get lost if the process is busy or gone.

        Raises:
            TypeError: the value cannot be sent.
        """
        if self._channel is not None and not self.ended.is_set():
            self._channel.send_soon([_NO_ANSWER_EXPECTED, value])

    async def call(self, value: Any, descriptor: int | None = None, *, limit_seconds: float = math.inf) -> Any:
        """Ask the process, and give its answer; as many as ``calls_at_once`` are asked side by side.

        Args:
            value: what is asked.
            descriptor: goes along.
            limit_seconds: how long the answer may take.  After that the process takes no more, as one whose caller has
                left for too long.

        Raises:
            WorkerEnded: the process ended before it answered, took too long, or takes no more.
            TypeError: the value cannot be sent; nothing has been.
            OSError: there is no memory left.

        Ownership: nothing once the caller has left.

        Cancellation: at once; what becomes of the request then is up to ``grace_seconds``.
        """
        pending, number = _PendingAnswer(), next(self._numbers)
        try:
            self._limiter.acquire_on_behalf_of_nowait(pending)
        except trio.WouldBlock:
            await self._limiter.acquire_on_behalf_of(pending)
        self._pending[number] = pending
        if limit_seconds == math.inf:
            await self._ask(pending, number, value, descriptor)
        else:
            with trio.move_on_after(limit_seconds) as scope:
                await self._ask(pending, number, value, descriptor)
            if scope.cancelled_caught:
                self._give_up(f"did not end within {limit_seconds:g} s")
                raise WorkerEnded(self.why, was_called=True)
        if not pending.is_answered:
            raise WorkerEnded(self.why, was_called=pending.was_sent)
        return pending.value

    async def sample(self, seconds: float, rate: float) -> list[SampledThreads]:
        """Have the stacks of its threads be sampled, beside what it is asked otherwise.

        Raises:
            WorkerEnded: the process has ended.
            TimeoutError: it does not answer: it reads no messages, or its code lets no other thread of Python run.
            ValueError: it sends nonsense, or says why it cannot.

        Cancellation: at once; the process goes on for as long as it was asked to.
        """
        pending, number = _PendingAnswer(), next(self._numbers)
        self._samples[number] = pending
        try:
            with trio.move_on_after(seconds + _SECONDS_TO_TELL):
                await self._send(SAMPLES, [number, seconds, rate], None)
                await pending.done.wait()
        except trio.BrokenResourceError:
            raise WorkerEnded(self.why, was_called=False) from None
        finally:
            del self._samples[number]
        if not pending.done.is_set():
            raise TimeoutError("its threads could not be looked at: its code lets no other run, or it was starting")
        if not pending.is_answered:
            raise WorkerEnded(self.why, was_called=False)
        return decode_samples(pending.value)

    async def _ask(self, pending: _PendingAnswer, number: int, value: Any, descriptor: int | None) -> None:
        pending.was_sent = True
        try:
            await self._send(number, value, descriptor)
        except trio.BrokenResourceError:
            pending.was_sent = False
        except BaseException:
            self._settle(number)
            raise
        try:
            await pending.done.wait()
        except trio.Cancelled:
            self._abandon(pending, number)
            raise

    async def _send(self, number: int, value: Any, descriptor: int | None) -> None:
        if self.is_retired or self._channel is None:
            raise WorkerEnded(self.why, was_called=False)
        await self._channel.send([number, value], descriptor)

    def _settle(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._limiter.release_on_behalf_of(pending)
            pending.done.set()
            self._kill_if_unneeded()

    def _abandon(self, pending: _PendingAnswer, number: int) -> None:
        pending.is_abandoned = True
        pending.value = None
        if self._tells_of_leaving:
            self.tell_soon(["cancel", number])
        if self._nursery is not None and not pending.done.is_set():
            self._nursery.start_soon(self._watch, pending)
        self._kill_if_unneeded()

    async def _watch(self, pending: _PendingAnswer) -> None:
        """Retire the process if a request whose caller has left does not end.

        Cancellation: at once.
        """
        with trio.move_on_after(self._grace_seconds):
            await pending.done.wait()
            return
        self._give_up(f"did not end within {self._grace_seconds:g} s of its caller's leaving")

    def _give_up(self, what: str) -> None:
        """Retire the process because of a call; see that it is killed."""
        if self._is_stuck:
            return
        self.why = f"was killed because a call {what}"
        self.is_retired = self._is_stuck = True
        self._stuck()
        self._kill_if_unneeded()
        if self._nursery is not None and self._spare_seconds != math.inf:
            self._nursery.start_soon(self._kill_later)

    async def _kill_later(self) -> None:
        """Kill the process, which others have requests of, too.

        Cancellation: at once.
        """
        await trio.sleep(self._spare_seconds)
        self.kill()

    def _kill_if_unneeded(self) -> None:
        if self._is_stuck and all(pending.is_abandoned for pending in self._pending.values()):
            self.kill()


# ----------------------------------------------------------------------
# A place for one worker process after the other: when one ends by itself, the next one is started
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)


class KeptProcess:
    """One of several places for processes that all do the same.

    Args:
        row: the number of the place.
        make: makes a process, which is then started.
        first: what each process is told first.
        descriptor: goes along with it.
        prepare: is called with a process that has been told, and its answer, and says whether it can be used; one that
            cannot is killed.
        cannot_start: is told that no process can be started, which is tried again; without it that ends :meth:`keep`.
        backoff: says when the next process is started.
        stopping: once it is set, no other process is started.
        changed: is called when a process has become ready, and when it has ended.
        ended: is called with the place, its process still in it, when that has ended; what it raises ends
            :meth:`keep`.

    Attributes:
        row: the number of the place.
        is_ready: whether there is a process that has answered what it was told first.
        given: how much the process has been given since.
        process: the one that lives, None if there is none.
        is_replaced: whether the process that ends next is followed by another one at once.
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
        changed: Callable[[], None],
        ended: Callable[[KeptProcess, WorkerProcess], None],
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
        """Run a process, and another one after it, until they are to stop.

        Raises:
            OSError: no process can be started.
            Exception: as ``ended``.

        Ownership: the process.

        Cancellation: at once; the process is killed.
        """
        while not self._stopping.is_set():
            started = trio.current_time()
            await self._run_one()
            if self._stopping.is_set():
                return
            if self.is_replaced:
                continue
            seconds = self._backoff.seconds_after(trio.current_time() - started)
            log.warning("starting another worker process", row=self.row, seconds=seconds)
            with trio.move_on_after(seconds):
                await self._stopping.wait()

    async def _run_one(self) -> None:
        """Run a process to its end.

        Raises:
            OSError: it cannot be started.
            Exception: as ``ended``.

        Cancellation: at once; the process is killed.
        """
        process = self.process = self._make()
        self.given = 0
        try:
            async with trio.open_nursery() as nursery:
                try:
                    answer = await process.start(nursery, self._first, descriptor=self._descriptor)
                    self.is_ready = self._prepare is None or await self._prepare(process, answer)
                except WorkerEnded:
                    self.is_ready = False
                except OSError as error:
                    if self._cannot_start is None:
                        raise
                    self._cannot_start(error)
                    return
                if self.is_ready:
                    self._tell_change()
                else:
                    process.kill()
            self._ended(self, process)
        finally:
            self.process = None
            self.is_ready = False
            self._tell_change()

    def _tell_change(self) -> None:
        self._changed()
        readiness_may_have_changed()

    async def give(self, value: Any, descriptor: int) -> bool:
        """Give the process a descriptor, and say what it is, if it can still take one.

        Ownership: the caller still has its own descriptor.

        Cancellation: at once; it is given or not.
        """
        if self.process is not None:
            self.given += 1
            try:
                await self.process.tell(value, descriptor)
            except WorkerEnded:
                self.is_ready = False
            else:
                return True
        return False

    async def tell(self, value: Any) -> None:
        """Tell the process something, if there is one that is ready.

        Cancellation: at once; it is told or not.
        """
        if self.process is not None and self.is_ready:
            with suppress(WorkerEnded):
                await self.process.tell(value)

    def dismiss(self) -> None:
        """Have the process finish what it has; one that is not ready has nothing, and may take long to become so."""
        if self.process is not None:
            (self.process.finish if self.is_ready else self.process.kill)()
