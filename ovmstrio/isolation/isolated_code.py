"""User code in worker processes, as seen by the server.

::

    server                                          worker process, optionally with its own interpreter
    IsolatedCode: slots of processes                bootstrap ── CodeHost: threads, and a loop for async code
      RestartedProcess ── WorkerProcess ── calls ─>   HostedObject: the user's object, one per process
      RemoteGenerator <── values, by credit ───────   GeneratorHost

The worker needs only the dependencies of :mod:`ovmstrio.isolation.messages`.
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
from ovmstrio.isolation.code_host import ENDED, GENERATOR, VALUE
from ovmstrio.isolation.generators import End, Failed
from ovmstrio.isolation.messages import MALFORMED_MESSAGE_ERRORS, decode_error
from ovmstrio.isolation.user_code import UserCodeRaisedError
from ovmstrio.isolation.worker_process import RestartedProcess, WorkerExited, WorkerProcess, call_headers
from ovmstrio.util.backoff import Backoff

# -- Generators --------------------------------------------------------------------------------------------------------


class RemoteGenerator:
    """Generator in a worker process, pulled value by value; see :class:`ovmstrio.isolation.generators.PulledGenerator`.

    ``number`` identifies it there; ``limit_seconds`` applies per value, ``grace_seconds`` to closing.
    """

    def __init__(self, process: WorkerProcess, number: int, limit_seconds: float, grace_seconds: float = 2.0) -> None:
        self._process = process
        self._number = number
        self._limit = limit_seconds
        self._grace_seconds = grace_seconds
        self._ready: deque[Any] = deque()
        self._end: End | Failed | None = None

    async def pull(self) -> Any:
        """Return the next value, ``End``, or ``Failed`` if the generator raised or its process exited."""
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
                kind, *payload = end
                self._end = End() if kind == ENDED else Failed(decode_error(*payload))
        except WorkerExited as ended:
            self._end = Failed(ended)
        except MALFORMED_MESSAGE_ERRORS as wrong:
            self._process.kill_for_violation(wrong)
            self._end = Failed(WorkerExited(self._process.why, was_called=True))

    async def aclose(self) -> BaseException | None:
        """Stop and close the generator, shielded for ``grace_seconds``; return the exception of closing, if any."""
        self._ready.clear()
        if self._end is not None:
            return None
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._grace_seconds):
            try:
                payload = await self._process.call(["close", self._number])
                return decode_error(payload[0]) if payload else None
            except WorkerExited:
                return None
            except MALFORMED_MESSAGE_ERRORS as wrong:
                self._process.kill_for_violation(wrong)
                return None
        return TimeoutError("the generator's step did not end; the generator is closed when it does")


# -- Processes ---------------------------------------------------------------------------------------------------------

MAX_CONCURRENT_CALLS: Final = 64
"""Maximum concurrent calls per process."""

GRACE_SECONDS: Final = 10.0
"""How long a call of a cancelled caller may run, unless another limit is set."""

SPARE_SECONDS: Final = 2.0
"""Time for the other calls of a process that is killed because of one call."""

_PROGRAM: Final = "ovmstrio.isolation.bootstrap"
_MIN_BACKOFF_SECONDS: Final = 0.05
_MAX_BACKOFF_SECONDS: Final = 10.0
_STABLE_SECONDS: Final = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation settings of a service.

    Attributes:
        processes: number of processes.
        python: interpreter; None for the server's.
        limit_seconds: time limit per call or generator value; 0 for none.
        memory_limit: resident bytes per process; 0 for no limit.
    """

    processes: int = 1
    python: Path | None = None
    limit_seconds: float = 0.0
    memory_limit: int = 0

    @classmethod
    def of(cls, spec: PythonSpec, *, is_default: bool, memory_limit: int) -> Isolation | None:
        """Return the settings of a service; None if its code runs in the server.

        ``is_default`` isolates services that do not specify it; ``memory_limit`` is the default in bytes.
        """
        if spec.isolation == "none" or (spec.isolation is None and not is_default):
            return None
        limit = memory_limit if spec.memory_limit is None else spec.memory_limit
        return cls(spec.processes, spec.python, spec.timeout_seconds, limit)


class CodeWorker:
    """One process whose object is ready; ``limit_seconds`` applies per answer (0 for none)."""

    __slots__ = ("_limit", "process")

    def __init__(self, process: WorkerProcess, limit_seconds: float) -> None:
        self.process = process
        self._limit = limit_seconds or math.inf

    async def call(self, method: str, value: Any, *, has_time_limit: bool = True) -> Any:
        """Call a method of the object; the caller must close a returned generator.

        Raises:
            UserCodeRaisedError: the method raised.
            WorkerExited: the process exited before it answered, or takes no more.
            OSError: out of memory.

        Cancellation: the code is notified; if it does not end in time, the process is replaced.
        """
        limit = self._limit if has_time_limit else math.inf
        headers = call_headers()
        request = ["call", method, value, headers] if headers else ["call", method, value]
        return self.result_of(await self.process.call(request, limit_seconds=limit))

    def result_of(self, answer: Any) -> Any:
        """Decode an answer; raises as :meth:`call`, and kills a process that sent an invalid one."""
        try:
            kind, payload = answer
            if kind == VALUE:
                return payload
            if kind == GENERATOR:
                return RemoteGenerator(self.process, payload, self._limit)
            error = decode_error(payload)
        except MALFORMED_MESSAGE_ERRORS as wrong:
            self.process.kill_for_violation(wrong)
            raise WorkerExited(self.process.why, was_called=True) from wrong
        raise UserCodeRaisedError(error)

    def forget(self, value: Any) -> None:
        """Drop state that the process keeps between calls."""
        self.process.send_or_drop(["forget", value])


class IsolatedCode:
    """The user's object in one or more processes, one instance per process.

    Exited processes are restarted, with increasing delays if they exit repeatedly.

    Args:
        isolation: number of processes, interpreter and limits.
        hosted: ``module:name`` of the function that creates the object; see :class:`HostedObject`.
        argument: its argument; plain data.
        prepare: initialises a created object; if it raises, the process is not used.
        names: log fields of the code and of its output.
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
        search_path = [] if isolation.python else [os.fspath(one) for one in sys.path]
        self._first = {"hosted": hosted, "argument": argument, "path": search_path}
        self._stopping = trio.Event()
        self._ended = trio.Event()
        self._changes = trio.lowlevel.ParkingLot()
        self._workers: dict[int, CodeWorker] = {}
        self._failures: dict[int, Exception] = {}
        self._slots = [self._create_slot(row) for row in range(isolation.processes)]

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that can be called."""
        return [worker.process.pid or 0 for worker in self._workers.values()]

    # -- Life cycle ----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the processes until :meth:`aclose`; call with ``nursery.start``, which returns when all are ready.

        Raises:
            UserCodeRaisedError: the object cannot be initialised.
            WorkerExited: a process exited before it was ready.
            OSError: a process cannot be started.
            Exception: raised by ``prepare``.
        """
        problem: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                for slot in self._slots:
                    nursery.start_soon(slot.keep)
                while len(self._workers) < len(self._slots) and not self._failures:
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
        """Finalise and end all processes; kill those that take longer than ``grace_seconds``. Shielded.

        May be called repeatedly, and before :meth:`run`.
        """
        self._stopping.set()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for slot in self._slots:
                    nursery.start_soon(self._close, slot, finalize, grace_seconds)

    async def _close(
        self, slot: RestartedProcess, finalize: Callable[[CodeWorker], Awaitable[None]], grace_seconds: float
    ) -> None:
        process, worker = slot.process, self._workers.pop(slot.row, None)
        if process is None:
            return
        if worker is not None and not process.is_retired:
            await finalize(worker)
        # Running calls get the grace period.
        await process.close(grace_seconds)

    # -- Processes -----------------------------------------------------------------------------------------------------

    def _create_slot(self, row: int) -> RestartedProcess:
        return RestartedProcess(
            row,
            self._create_process,
            self._first,
            prepare=partial(self._initialise, row),
            cannot_start=partial(self._record_failure, row),
            backoff=Backoff(_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS),
            stopping=self._stopping,
            changed=self._changes.unpark_all,
            ended=self._on_exit,
        )

    def _create_process(self) -> WorkerProcess:
        isolation = self._isolation

        def stuck() -> None:
            log.warning("worker process replaced: call timed out", pid=process.pid, **self._names)

        process = WorkerProcess(
            _PROGRAM,
            python=isolation.python,
            max_concurrent_calls=MAX_CONCURRENT_CALLS,
            grace_seconds=isolation.limit_seconds or GRACE_SECONDS,
            kill_delay_seconds=SPARE_SECONDS,
            sends_cancel=True,
            memory_limit=isolation.memory_limit,
            on_stuck=stuck,
            kills_group=True,
            log_fields=self._names,
        )
        return process

    async def _initialise(self, row: int, process: WorkerProcess, answer: Any) -> bool:
        """Initialise the object of a process; return whether it succeeded."""
        worker = CodeWorker(process, self._isolation.limit_seconds)
        try:
            worker.result_of(answer)
            await self._prepare(worker)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            self._record_failure(row, error)
            return False
        self._failures.pop(row, None)
        self._workers[row] = worker
        return True

    def _record_failure(self, row: int, error: Exception) -> None:
        self._failures[row] = error
        self._changes.unpark_all()

    def _on_exit(self, slot: RestartedProcess, process: WorkerProcess) -> None:
        was_ready = self._workers.pop(slot.row, None) is not None
        if self._stopping.is_set():
            return
        log.error("worker process exited", pid=process.pid, reason=process.why, **self._names)
        if not was_ready and slot.row not in self._failures:
            self._record_failure(slot.row, WorkerExited(process.why, was_called=True))

    # -- Calls ---------------------------------------------------------------------------------------------------------

    async def worker(self) -> CodeWorker:
        """Return the process with the fewest calls, once one is ready; raises ``NotReady`` if none can be started."""
        while True:
            usable = [worker for worker in self._workers.values() if not worker.process.is_retired]
            if usable:
                return min(usable, key=lambda worker: worker.process.load)
            if self._stopping.is_set():
                raise NotReady("the worker processes are closed")
            if len(self._failures) == len(self._slots):
                reason = next(iter(self._failures.values()))
                raise NotReady(f"the worker process cannot be started again: {reason}")
            await self._changes.park()

    async def call(self, method: str, value: Any) -> tuple[CodeWorker, Any]:
        """Call a method in the process with the fewest calls; return the process and the result.

        Raises like :meth:`worker` and :meth:`CodeWorker.call`; retries on another process if this one exited before the
        call.
        """
        while True:
            worker = await self.worker()
            try:
                return worker, await worker.call(method, value)
            except WorkerExited as end:
                if end.was_called:
                    raise
