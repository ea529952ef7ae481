"""Code of users in processes of their own.

::

    server                                          worker process, under an interpreter of its own if need be
    IsolatedCode: places for processes              bootstrap ── CodeHost: threads, and a loop for what is async
      KeptProcess ── WorkerProcess ── calls ──────>   Hosted: the user's object, one in each process
      RemoteGenerator <── values, by credit ───────   GeneratorHost

What runs in the worker needs no more than :mod:`ovmstrio.isolation.codec` does.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from ovmstrio.config.specs import PythonSpec
from ovmstrio.core.errors import NotReady
from ovmstrio.core.tracing import current_span
from ovmstrio.isolation.channel import NO_MESSAGE
from ovmstrio.isolation.code_host import GENERATOR, VALUE
from ovmstrio.isolation.codec import decode_error
from ovmstrio.isolation.generator_hosts import ENDED, RAISED
from ovmstrio.isolation.generators import End, Failed
from ovmstrio.isolation.user_code import UserCodeRaisedError
from ovmstrio.isolation.worker_process import KeptProcess, WorkerEnded, WorkerProcess
from ovmstrio.util.backoff import Backoff

__all__ = ["CALLS_AT_ONCE", "GRACE_SECONDS", "CodeWorker", "IsolatedCode", "Isolation", "RemoteGenerator"]

# ----------------------------------------------------------------------
# A generator in a worker process, as the server sees it
# ----------------------------------------------------------------------


class RemoteGenerator:
    """A generator that is pulled value by value; see :class:`ovmstrio.isolation.generators.Pump`.

    Args:
        process: where it lives.
        number: its number there.
        limit_seconds: how long a value may take.
        grace_seconds: how long closing may take.
    """

    def __init__(self, process: WorkerProcess, number: int, limit_seconds: float, grace_seconds: float = 2.0) -> None:
        self._process = process
        self._number = number
        self._limit = limit_seconds
        self._grace_seconds = grace_seconds
        self._ready: deque[Any] = deque()
        self._end: End | Failed | None = None

    async def pull(self) -> Any:
        """Give the next value; an ``End`` after the last, a ``Failed`` where the generator raised or its process ended.

        Cancellation: while none is ready; the generator stops within one step.
        """
        while not self._ready:
            if self._end is not None:
                return self._end
            await self._fetch()
        return self._ready.popleft()

    async def _fetch(self) -> None:
        try:
            values, end = await self._process.call(["pull", self._number], limit_seconds=self._limit)
            self._ready.extend(values)
            if end is not None:
                kind, *told = end
                self._end = End() if kind == ENDED else Failed(decode_error(*told))
        except WorkerEnded as ended:
            self._end = Failed(ended)
        except NO_MESSAGE as wrong:
            self._process.condemn(wrong)
            self._end = Failed(WorkerEnded(self._process.why, was_called=True))

    async def aclose(self) -> BaseException | None:
        """Stop the generator and close it, within one step; gives what closing raised.

        Cancellation: shielded, for ``grace_seconds``.
        """
        self._ready.clear()
        if self._end is not None:
            return None
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._grace_seconds):
            try:
                told = await self._process.call(["close", self._number])
                return decode_error(told[0]) if told else None
            except WorkerEnded:
                return None
            except NO_MESSAGE as wrong:
                self._process.condemn(wrong)
                return None
        return TimeoutError("the generator's step did not end; the generator is closed when it does")


# ----------------------------------------------------------------------
# Code of users in worker processes, as the server sees it: several processes that do the same, and calls to them
# ----------------------------------------------------------------------

CALLS_AT_ONCE: Final = 64
"""How many calls a process works on side by side; others wait, as for threads."""

GRACE_SECONDS: Final = 10.0
"""How long a call may go on whose caller has left, where no other limit is set."""

SPARE_SECONDS: Final = 2.0
"""How long the other calls of a process have to end when one of them is to be ended by force."""

_PROGRAM: Final = "ovmstrio.isolation.bootstrap"
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 10.0
_STABLE: Final = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Isolation:
    """How code of users is run beside the server.

    Attributes:
        processes: how many processes do the same.
        python: their interpreter; None for the server's own.
        limit_seconds: how long a call may take, or a value of a generator; 0 for any time.
        memory_limit: how many bytes of memory each process may have; 0 for any number.
    """

    processes: int = 1
    python: Path | None = None
    limit_seconds: float = 0.0
    memory_limit: int = 0

    @classmethod
    def of(cls, spec: PythonSpec, *, is_default: bool, memory_limit: int) -> Isolation | None:
        """Read the settings of a service; None if its code runs in the server.

        Args:
            spec: the service's.
            is_default: whether code runs in processes where the service does not say.
            memory_limit: that of services which have none of their own.
        """
        if spec.isolation == "none" or (spec.isolation is None and not is_default):
            return None
        limit = memory_limit if spec.memory_limit is None else spec.memory_limit
        return cls(spec.processes, spec.python, spec.timeout_seconds, limit)


class CodeWorker:
    """One process, whose object is ready to be called.

    Args:
        process: what is below.
        limit_seconds: how long each answer may take.
    """

    __slots__ = ("_limit", "process")

    def __init__(self, process: WorkerProcess, limit_seconds: float) -> None:
        self.process = process
        self._limit = limit_seconds or math.inf

    async def call(self, method: str, value: Any, *, is_limited: bool = True) -> Any:
        """Call a method of the object; a generator that it gives is the caller's to close.

        Raises:
            UserCodeRaisedError: it raised.
            WorkerEnded: the process ended before it answered, or takes no more.
            OSError: there is no memory left.

        Cancellation: at once; the code is told, and the process is replaced if it goes on for too long.
        """
        limit = self._limit if is_limited else math.inf
        span = current_span.get()
        asked = ["call", method, value] if span is None else ["call", method, value, dict(span.headers())]
        answer = await self.process.call(asked, limit_seconds=limit)
        try:
            kind, told = answer
            if kind == VALUE:
                return told
            if kind == GENERATOR:
                return RemoteGenerator(self.process, told, self._limit)
            error = decode_error(told)
        except NO_MESSAGE as wrong:
            self.process.condemn(wrong)
            raise WorkerEnded(self.process.why, was_called=True) from wrong
        raise UserCodeRaisedError(error)

    def forget(self, value: Any) -> None:
        """Have the process give up what it has kept between calls."""
        self.process.tell_soon(["forget", value])


class IsolatedCode:
    """The user's object in one or several processes, each of which has one of its own.

    A process that ends is replaced, at once at first, and later if it ends again and again.

    Args:
        isolation: how many processes, under which interpreter, and their limits.
        hosted: what makes the object in a process, as ``module:name`` of a function; see :mod:`hosted`.
        argument: what it is made of; plain data.
        prepare: makes an object ready that has been made, by calls; what it raises keeps the process from being used.
        names: tell in logs whose code it is, also of what it prints.
    """

    def __init__(
        self,
        isolation: Isolation,
        hosted: str,
        argument: Any,
        *,
        prepare: Callable[[CodeWorker], Awaitable[None]],
        names: dict[str, str],
    ) -> None:
        self._isolation = isolation
        self._prepare = prepare
        self._names = names
        path = [] if isolation.python else [os.fspath(one) for one in sys.path]
        self._first = {"hosted": hosted, "argument": argument, "path": path}
        self._stopping = trio.Event()
        self._ended = trio.Event()
        self._changes = trio.lowlevel.ParkingLot()
        self._workers: dict[int, CodeWorker] = {}
        self._failures: dict[int, Exception] = {}
        self._kept = [self._place(row) for row in range(isolation.processes)]

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes that can be called."""
        return [worker.process.pid or 0 for worker in self._workers.values()]

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Host the processes until :meth:`aclose`; to be started with ``nursery.start``, and ready when all are.

        Raises:
            UserCodeRaisedError: the object cannot be made ready.
            WorkerEnded: a process ended before.
            OSError: no process can be started.
            Exception: what ``prepare`` raises.

        Ownership: all processes.

        Cancellation: at once; the processes are killed.
        """
        problem: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                for kept in self._kept:
                    nursery.start_soon(kept.keep)
                while len(self._workers) < len(self._kept) and not self._failures:
                    await self._changes.park()
                problem = next(iter(self._failures.values()), None)
                if problem is not None:
                    nursery.cancel_scope.cancel()
                else:
                    task_status.started()
        finally:
            self._stopping.set()
            self._ended.set()
            self._changes.unpark_all()
        if problem is not None:
            raise problem

    async def aclose(self, finalize: Callable[[CodeWorker], Awaitable[None]], grace_seconds: float) -> None:
        """End all processes, each after it has been finalized; by force if that takes longer than ``grace_seconds``.

        May be called twice, and before :meth:`run`.

        Cancellation: shielded, for it is bounded.
        """
        self._stopping.set()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for kept in self._kept:
                    nursery.start_soon(self._close, kept, finalize, grace_seconds)

    async def _close(
        self, kept: KeptProcess, finalize: Callable[[CodeWorker], Awaitable[None]], grace_seconds: float
    ) -> None:
        process, worker = kept.process, self._workers.pop(kept.row, None)
        if process is None:
            return
        if worker is not None and not process.is_retired:
            await finalize(worker)
        # Whatever still runs is in the way of nothing: code that can end does so within the grace.
        await process.close(grace_seconds)

    # Processes

    def _place(self, row: int) -> KeptProcess:
        return KeptProcess(
            row,
            self._make,
            self._first,
            prepare=partial(self._make_ready, row),
            cannot_start=partial(self._fail, row),
            backoff=Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, _STABLE),
            stopping=self._stopping,
            changed=self._tell_change,
            ended=self._notice_end,
        )

    def _make(self) -> WorkerProcess:
        isolation = self._isolation

        def stuck() -> None:
            log.warning("a worker process is replaced: a call does not end", pid=process.pid, **self._names)

        process = WorkerProcess(
            _PROGRAM,
            python=isolation.python,
            calls_at_once=CALLS_AT_ONCE,
            grace_seconds=isolation.limit_seconds or GRACE_SECONDS,
            spare_seconds=SPARE_SECONDS,
            tells_of_leaving=True,
            memory_limit=isolation.memory_limit,
            stuck=stuck,
            ends_group=True,
            names=self._names,
        )
        return process

    async def _make_ready(self, row: int, process: WorkerProcess, answer: Any) -> bool:
        """Have the object made ready; keep what keeps it from that.

        Cancellation: at once.
        """
        worker = CodeWorker(process, self._isolation.limit_seconds)
        try:
            _check_made(answer)
            await self._prepare(worker)
        except Exception as error:  # noqa: BLE001 - the border of user code
            self._fail(row, error)
            return False
        self._failures.pop(row, None)
        self._workers[row] = worker
        return True

    def _tell_change(self) -> None:
        self._changes.unpark_all()

    def _fail(self, row: int, error: Exception) -> None:
        self._failures[row] = error
        self._changes.unpark_all()

    def _notice_end(self, kept: KeptProcess, process: WorkerProcess) -> None:
        was_ready = self._workers.pop(kept.row, None) is not None
        if self._stopping.is_set():
            return
        log.error("a worker process of user code has ended", pid=process.pid, why=process.why, **self._names)
        if not was_ready and kept.row not in self._failures:
            self._fail(kept.row, WorkerEnded(process.why, was_called=True))

    # Calls

    async def worker(self) -> CodeWorker:
        """Give the process with the fewest calls; wait for one that is being started.

        Raises:
            NotReady: none can be started, or all are closed.

        Cancellation: at once.
        """
        while True:
            usable = [worker for worker in self._workers.values() if not worker.process.is_retired]
            if usable:
                return min(usable, key=lambda worker: worker.process.load)
            if self._stopping.is_set():
                raise NotReady("the worker processes of this code are closed")
            if len(self._failures) == len(self._kept):
                reason = next(iter(self._failures.values()))
                raise NotReady(f"the worker process cannot be started again: {reason}")
            await self._changes.park()

    async def call(self, method: str, value: Any) -> tuple[CodeWorker, Any]:
        """Call a method of whichever object has the fewest calls; give the process, too.

        Raises:
            UserCodeRaisedError: it raised.
            WorkerEnded: the process ended before it answered.
            NotReady: as :meth:`worker`.
            OSError: there is no memory left.

        Cancellation: as :meth:`CodeWorker.call`.
        """
        while True:
            worker = await self.worker()
            try:
                return worker, await worker.call(method, value)
            except WorkerEnded as end:
                if end.was_called:
                    raise


def _check_made(answer: Any) -> None:
    """See that a process has made its object.

    Raises:
        UserCodeRaisedError: what it is made of has raised.
    """
    if answer[0] == RAISED:
        raise UserCodeRaisedError(decode_error(answer[1]))
