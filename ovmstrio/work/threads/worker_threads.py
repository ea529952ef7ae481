"""Threads for blocking user code, cheaper for each call than a thread hop of trio's.

::

    start ──> SimpleQueue ──> worker thread ──> deque of finished jobs ──> one wake-up of the event loop for all of them

A worker is a loop inside ``trio.to_thread.run_sync``, hosted by a task of the pool, so that no thread lives outside
the tree of tasks.  Workers are started when there is more to do than there are workers, and end when they have had
nothing to do for some seconds.  One that does not come back although its caller has left is given up: it counts as
stuck, another takes its place, and the pool ends without it.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple, cast

import structlog
import trio

__all__ = ["GRACE_SECONDS", "Job", "WorkerThreads"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

log = structlog.get_logger(__name__)

GRACE_SECONDS: Final = 2.0
"""How long user code that was told to stop may go on before its thread is given up."""
_LIMIT: Final = 64
_IDLE_SECONDS: Final = 10.0


class _Worker:
    """One thread; ``is_abandoned`` once nobody waits for what it does."""

    __slots__ = ("is_abandoned",)

    def __init__(self) -> None:
        self.is_abandoned = False


class Job:
    """One call that was handed to the pool."""

    __slots__ = (
        "args",
        "claim",
        "context",
        "error",
        "fn",
        "is_abandoned",
        "is_done",
        "on_done",
        "value",
        "waiter",
        "worker",
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        on_done: Callable[[], None] | None,
    ) -> None:
        self.fn: Callable[..., Any] = fn
        self.args = args
        self.context = context
        self.on_done = on_done
        self.claim = threading.Lock()
        self.value: Any = None
        self.error: BaseException | None = None
        self.worker: _Worker | None = None
        self.waiter: trio.lowlevel.Task | None = None
        self.is_done = False
        self.is_abandoned = False

    def run(self) -> None:
        """Make the call, in a worker thread; whatever it raises is kept for whoever waits, ``SystemExit`` too."""
        try:
            self.value = self.context.run(self.fn, *self.args)
        except BaseException as error:  # noqa: BLE001 - as said
            self.error = error


class WorkerThreads:
    """A pool of threads for the blocking calls of one loaded graph or handler.

    Args:
        limit: how many calls may run at once; others wait in a queue, in the order in which they came.
        grace_seconds: how long a call whose caller has left is waited for.
        idle_seconds: after how long without work a thread ends; None for never.
        is_strict: whether a thread that does not come back keeps its place, so that there are never more threads than
            ``limit``, and always the same ones if none goes idle.

    Attributes:
        stuck: threads that were given up and still run; with them there are at most twice ``limit``.
    """

    def __init__(
        self,
        limit: int = _LIMIT,
        grace_seconds: float = GRACE_SECONDS,
        idle_seconds: float | None = _IDLE_SECONDS,
        *,
        is_strict: bool = False,
    ) -> None:
        self.stuck = 0
        self._is_strict = is_strict
        self._limit = limit
        self.grace_seconds = grace_seconds
        self._idle_seconds = idle_seconds
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._finished: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._open_jobs = 0
        self._workers = 0
        self._nursery: trio.Nursery | None = None
        self._loop: trio.lowlevel.TrioToken | None = None
        self._limiter = trio.CapacityLimiter(math.inf)
        self._closing = trio.Event()
        self._closed = trio.Event()

    @property
    def is_crowded(self) -> bool:
        """Whether calls wait for a thread; those who could go on later had better let them."""
        return self._open_jobs > self._limit

    # Life

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Host the threads until :meth:`aclose`; to be started with ``nursery.start``.

        Ownership: all threads of the pool; those that are stuck ``grace_seconds`` after the end are left behind.

        Cancellation: shielded, because those who are cancelled need threads for cleaning up; whoever starts this must
        call :meth:`aclose`.
        """
        with trio.CancelScope(shield=True):
            try:
                async with trio.open_nursery() as nursery:
                    self._loop = trio.lowlevel.current_trio_token()
                    self._nursery = nursery
                    task_status.started()
                    await self._closing.wait()
                    self._nursery = None
                    nursery.cancel_scope.deadline = trio.current_time() + self.grace_seconds
                    self._dismiss()
            finally:
                self._nursery = None
                self._closed.set()

    async def aclose(self) -> None:
        """End all threads, and return when :meth:`run` has ended.  May be called twice, and before :meth:`run`.

        Cancellation: at once; the threads end all the same.
        """
        self._closing.set()
        if self._loop is not None:
            await self._closed.wait()

    def _dismiss(self) -> None:
        for _ in range(self._workers + self.stuck):
            self._queue.put(None)

    # Calls

    async def call(
        self,
        fn: Callable[[*_Ts], _T],
        *args: *_Ts,
        on_cancel: Callable[[], None] | None = None,
        context: contextvars.Context | None = None,
        may_leave: bool = False,
    ) -> _T:
        """Call ``fn`` in a thread and give what it returns.

        Args:
            fn: the blocking function.
            args: its arguments.
            on_cancel: called when the caller is cancelled while ``fn`` runs; should make ``fn`` end.
            may_leave: whether a caller that is cancelled leaves ``fn`` running in its thread, and its result to nobody.
            context: the context that ``fn`` runs in, a copy of the caller's by default.

        Raises:
            BaseException: whatever ``fn`` raises.
            RuntimeError: the pool does not run.

        Ownership: the call; it has ended, or its thread was given up, when this returns, unless it ``may_leave``.

        Cancellation: a call that waits for a thread is dropped; one that runs is waited for, shielded, for
        ``grace_seconds``, or left.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        job = self.start(fn, *args, context=context)
        try:
            await self._wait(job)
        except BaseException:
            if not self._withdraw(job):
                if on_cancel is not None:
                    on_cancel()
                if not may_leave:
                    await self.finish(job)
            raise
        if job.error is not None:
            raise job.error
        return cast("_T", job.value)

    def start(
        self,
        fn: Callable[[*_Ts], Any],
        *args: *_Ts,
        on_done: Callable[[], None] | None = None,
        context: contextvars.Context | None = None,
    ) -> Job:
        """Hand a call over without waiting for it; the caller must see to its end with :meth:`finish`.

        ``on_done`` is called on the event loop when the call has ended, unless it was given up.

        Raises:
            RuntimeError: the pool does not run.
        """
        if self._nursery is None:
            raise RuntimeError("the worker threads do not run: what they belong to is not loaded yet, or was closed")
        job = Job(fn, args, contextvars.copy_context() if context is None else context, on_done)
        self._open_jobs += 1
        self._queue.put(job)
        self._hire()
        return job

    async def finish(self, job: Job, seconds: float | None = None) -> bool:
        """Wait for a call to end; give its thread up after ``seconds`` (``grace_seconds`` by default) and say False.

        Cancellation: shielded, for it is bounded.
        """
        if not job.is_done and not job.is_abandoned:
            patience = self.grace_seconds if seconds is None else seconds
            with trio.CancelScope(shield=True, deadline=trio.current_time() + patience):
                await self._wait(job)
            self._give_up(job)
        return job.is_done

    def wake(self, callback: Callable[[], None]) -> None:
        """Have a callback run on the event loop soon, together with whatever else has to; for worker threads."""
        self._finished.append(callback)
        if not self._is_waking:
            self._is_waking = True
            # A thread that was given up may outlive the event loop.
            with suppress(trio.RunFinishedError):
                cast("trio.lowlevel.TrioToken", self._loop).run_sync_soon(self._run_finished)

    # On the event loop

    async def _wait(self, job: Job) -> None:
        if job.is_done:
            await trio.lowlevel.checkpoint()
            return
        job.waiter = trio.lowlevel.current_task()

        def abort(_raise_cancel: Any) -> trio.lowlevel.Abort:
            job.waiter = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _run_finished(self) -> None:
        # A thread that still sees the flag has put its callback into the queue before, so that it is found below.
        self._is_waking = False
        finished = self._finished
        while finished:
            finished.popleft()()

    def _settle(self, job: Job) -> None:
        if job.is_abandoned:
            return
        self._open_jobs -= 1
        job.is_done = True
        waiter, job.waiter = job.waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)
        if job.on_done is not None:
            job.on_done()

    def _withdraw(self, job: Job) -> bool:
        """Take back a call that no thread has begun; it stays in the queue, and whoever finds it there drops it."""
        if not job.claim.acquire(blocking=False):
            return False
        self._open_jobs -= 1
        job.is_abandoned = True
        job.fn, job.args = _nothing, ()
        return True

    def _give_up(self, job: Job) -> None:
        if job.is_done or self._withdraw(job) or self._is_strict:
            return
        job.is_abandoned = True
        self._open_jobs -= 1
        worker = job.worker
        if worker is not None and not worker.is_abandoned:
            worker.is_abandoned = True
            self._workers -= 1
            self.stuck += 1
            self._hire()
        log.warning("user code does not end; its thread was given up", stuck=self.stuck, limit=self._limit)

    def _hire(self) -> None:
        nursery = self._nursery
        if nursery is None or self._open_jobs <= self._workers:
            return
        if self._workers < self._limit and self._workers + self.stuck < 2 * self._limit:
            self._workers += 1
            nursery.start_soon(self._host, _Worker(), name="worker thread of user code")

    async def _host(self, worker: _Worker) -> None:
        """Own one thread.

        Cancellation: at once; only stuck threads are left then, and they end with what they do.
        """
        await trio.to_thread.run_sync(self._work, worker, abandon_on_cancel=True, limiter=self._limiter)
        if worker.is_abandoned:
            self.stuck -= 1
        else:
            self._workers -= 1
        # A call may have come while the thread was leaving.
        self._hire()

    # In the threads

    def _work(self, worker: _Worker) -> None:
        while not worker.is_abandoned:
            try:
                job = self._queue.get(timeout=self._idle_seconds)
            except queue.Empty:
                return
            if job is None:
                return
            if job.claim.acquire(blocking=False):
                job.worker = worker
                job.run()
                self._report(job)
            del job

    def _report(self, job: Job) -> None:
        self.wake(partial(self._settle, job))


def _nothing() -> None:
    """Stand for a call that was taken back."""
