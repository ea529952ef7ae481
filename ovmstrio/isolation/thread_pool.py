"""Thread pool for blocking user code, with cheaper calls than ``trio.to_thread.run_sync``.

::

    start ──> SimpleQueue ──> worker thread ──> deque of finished calls ──> one wake-up of the event loop for all

A worker is a loop inside ``trio.to_thread.run_sync``, run by a task of the pool. Workers are started on demand and end
after some idle seconds. If a call does not end after its caller was cancelled, its thread is abandoned: it counts as
stuck, another thread takes its place, and the pool closes without it. With ``is_abandonable`` callers leave their calls
at once; these count as abandoned, their results are discarded, and ``refusal`` may limit their number. A call that
waits for another call may release its place meanwhile (``release_place_while_waiting``).
"""

from __future__ import annotations

import contextvars
import enum
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

import structlog
import trio

from ovmstrio.core.errors import QueueTimeout
from ovmstrio.core.resource_registry import current_owner, current_resource_registry
from ovmstrio.util.stdio import code_names, finish_lines

# -- Places ------------------------------------------------------------------------------------------------------------


class PoolThread:
    """One thread of a pool.

    Attributes:
        is_abandoned: its result is not needed any more.
        has_place: counts among the threads that may run calls.
        is_waiting: waits for another call and has released its place.
        gate: released when the thread gets a place back; None if it does not wait for one.
    """

    __slots__ = ("gate", "has_place", "is_abandoned", "is_waiting", "places")

    def __init__(self, places: ThreadPlaces) -> None:
        self.places = places
        self.is_abandoned = False
        self.has_place = False
        self.is_waiting = False
        self.gate: threading.Semaphore | None = None


class ThreadPlaces:
    """Places of a pool: permits of its threads to run calls. Thread-safe, without blocking the event loop.

    Args:
        limit: number of places.
        look: wakes an idle thread, which then offers its place to waiting threads; thread-safe.
        lent: called when a place was released by a waiting call; thread-safe.
    """

    def __init__(self, limit: int, look: Callable[[], None], lent: Callable[[], None]) -> None:
        self.stuck = 0
        self._limit = limit
        self._wake_idle = look
        self._on_lent = lent
        self._lock = threading.Lock()
        self._taken = 0
        self._starting = 0
        self._lent = 0
        self._returning: deque[PoolThread] = deque()
        self._is_closed = False

    @property
    def taken(self) -> int:
        """Number of threads that have a place or are starting."""
        return self._taken + self._starting

    @property
    def lent(self) -> int:
        """Number of threads that have released their place while they wait."""
        return self._lent

    @property
    def is_wanted(self) -> bool:
        """True if a thread waits to get its place back."""
        return bool(self._returning)

    def reserve(self, calls: int) -> bool:
        """Reserve a place for a new thread if ``calls`` running and waiting calls need one; return whether reserved."""
        # Usually none is needed, and every released place triggers another check.
        if calls <= self._taken + self._starting:
            return False
        with self._lock:
            thread_count = self._taken + self._starting
            is_needed = calls - self._lent - len(self._returning) > thread_count
            if not is_needed or thread_count >= self._limit or thread_count + self.stuck >= 2 * self._limit:
                return False
            self._starting += 1
            return True

    def begin(self, thread: PoolThread) -> None:
        """Take the reserved place, unless a returning thread got it; called in the new thread."""
        with self._lock:
            self._starting -= 1
            if self._taken < self._limit:
                self._admit(thread)

    def end(self, thread: PoolThread) -> None:
        """Release the place of a thread that has ended."""
        with self._lock:
            if thread.is_abandoned:
                self.stuck -= 1
            elif thread.has_place:
                self._free(thread)

    def give_up(self, thread: PoolThread) -> None:
        """Count a thread as stuck and release its place."""
        with self._lock:
            thread.is_abandoned = True
            self.stuck += 1
            if thread.has_place:
                self._free(thread)
            elif thread.is_waiting:
                self._lent -= 1
            elif thread.gate is not None:
                self._returning.remove(thread)
                thread.gate.release()

    def close(self) -> int:
        """Assign places to all returning threads; return the number of threads."""
        with self._lock:
            self._is_closed = True
            while self._returning:
                self._admit(self._returning.popleft())
            return self._taken + self._starting + self._lent + self.stuck

    # -- Called in worker threads --------------------------------------------------------------------------------------

    def lend(self, thread: PoolThread) -> None:
        """Release the place of a thread until :meth:`take_back`."""
        with self._lock:
            thread.is_waiting = True
            if thread.is_abandoned:
                return
            self._lent += 1
            self._free(thread)
        self._on_lent()

    def take_back(self, thread: PoolThread) -> None:
        """Wait for a place, unless the thread was abandoned."""
        with self._lock:
            thread.is_waiting = False
            if thread.is_abandoned:
                return
            self._lent -= 1
            if self._is_closed or self._taken < self._limit:
                self._admit(thread)
                return
            gate = thread.gate = threading.Semaphore(0)
            self._returning.append(thread)
        self._wake_idle()
        gate.acquire()

    def hand_over(self, thread: PoolThread) -> None:
        """Pass the place of a thread that has ended its call to the first returning thread."""
        with self._lock:
            if self._returning and thread.has_place:
                self._free(thread)

    def _free(self, thread: PoolThread) -> None:
        thread.has_place = False
        self._taken -= 1
        if self._returning:
            self._admit(self._returning.popleft())

    def _admit(self, thread: PoolThread) -> None:
        thread.has_place = True
        self._taken += 1
        if thread.gate is not None:
            thread.gate.release()
            thread.gate = None


class _CurrentThread(threading.local):
    thread: PoolThread | None = None


_current: Final = _CurrentThread()


@contextmanager
def set_current_thread(thread: PoolThread) -> Iterator[None]:
    """Mark the current thread as ``thread`` during the block."""
    _current.thread = thread
    try:
        yield
    finally:
        _current.thread = None


@contextmanager
def release_place_while_waiting() -> Iterator[None]:
    """Release this thread's place to other calls of its pool while the block waits; no effect in other threads.

    The caller must bound the number of such blocks, because each keeps its thread. No lock that another call needs may
    be held at the end of the block, which waits for a place.
    """
    thread = _current.thread
    if thread is None or thread.is_waiting:
        yield
        return
    thread.places.lend(thread)
    try:
        yield
    finally:
        thread.places.take_back(thread)


# -- Pool --------------------------------------------------------------------------------------------------------------

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

log = structlog.get_logger(__name__)

GRACE_SECONDS: Final = 2.0
"""How long a cancelled call may continue before its thread is abandoned."""
_LIMIT: Final = 64
_IDLE_SECONDS: Final = 10.0

RefusalCheck = Callable[[int], Exception | None]
"""Returns the error for a new call, given the number of abandoned calls; None to accept it."""


class _Signal(enum.Enum):
    """Queue entries other than calls."""

    END = enum.auto()
    LOOK = enum.auto()
    """A thread may wait for a place."""


class ThreadCall:
    """One call in the pool."""

    __slots__ = (
        "args",
        "claim",
        "context",
        "discard",
        "discard_lock",
        "error",
        "fn",
        "is_abandoned",
        "is_done",
        "is_left",
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
        discard: Callable[[Any], object] | None,
    ) -> None:
        self.fn: Callable[..., Any] = fn
        self.args = args
        self.context = context
        self.on_done = on_done
        self.discard = discard
        self.claim = threading.Lock()
        self.discard_lock = None if discard is None else threading.Lock()
        self.value: Any = None
        self.error: BaseException | None = None
        self.worker: PoolThread | None = None
        self.waiter: trio.lowlevel.Task | None = None
        self.is_done = False
        self.is_left = False
        self.is_abandoned = False

    def run(self) -> None:
        """Run the call in a worker thread and keep its result or exception, including ``SystemExit``."""
        try:
            self.value = self.context.run(self._run_and_flush)
            self.meet()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self.error = error

    def _run_and_flush(self) -> Any:
        try:
            return self.fn(*self.args)
        finally:
            finish_lines()

    def meet(self) -> None:
        """Discard the result on the second of two calls: one by the thread, one by the leaving caller."""
        if self.discard is not None and self.discard_lock is not None and not self.discard_lock.acquire(blocking=False):
            self.discard(self.value)


class WorkerThreads:
    """Thread pool for the blocking calls of one loaded graph or handler.

    Args:
        limit: maximum number of concurrent calls; others wait in FIFO order.
        grace_seconds: how long a call of a cancelled caller is waited for.
        idle_seconds: idle time after which a thread ends; None for never.
        is_strict: a thread that does not return keeps its place, so that there are never more than ``limit`` threads.
        refusal: may refuse calls because of abandoned ones.
        on_abandoned: called with the number of abandoned calls when it increases.
        log_fields: log fields of printed output; default: those of the caller's context.

    Attributes:
        abandoned: running calls whose callers have left.
    """

    def __init__(
        self,
        limit: int = _LIMIT,
        grace_seconds: float = GRACE_SECONDS,
        idle_seconds: float | None = _IDLE_SECONDS,
        *,
        is_strict: bool = False,
        refusal: RefusalCheck | None = None,
        on_abandoned: Callable[[int], object] | None = None,
        log_fields: Mapping[str, str] | None = None,
    ) -> None:
        self.abandoned = 0
        self.names = log_fields
        self._owner = current_owner.get()
        self._refusal = refusal
        self._on_leave = on_abandoned
        self._is_strict = is_strict
        self._limit = limit
        self.grace_seconds = grace_seconds
        self._idle_seconds = idle_seconds
        self._queue: queue.SimpleQueue[ThreadCall | _Signal] = queue.SimpleQueue()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._open_jobs = 0
        self._process = os.getpid()
        self._places = ThreadPlaces(
            limit, partial(self._queue.put, _Signal.LOOK), partial(self.wake, self._start_thread)
        )
        self._nursery: trio.Nursery | None = None
        self._loop: trio.lowlevel.TrioToken | None = None
        self._limiter = trio.CapacityLimiter(math.inf)
        self._closing = trio.Event()
        self._closed = trio.Event()
        self._waiting_for_idle = trio.lowlevel.ParkingLot()

    @property
    def stuck(self) -> int:
        """Number of abandoned threads that still run; together with the others at most twice ``limit``."""
        return self._places.stuck

    @property
    def threads(self) -> int:
        """Number of threads, without stuck ones."""
        return self._places.taken + self._places.lent

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a thread."""
        return max(0, self._open_jobs - self._places.lent - self._limit)

    @property
    def is_busy(self) -> bool:
        """True if a call is running, including calls of cancelled callers."""
        return self._open_jobs > 0

    async def idle(self) -> None:
        """Wait until every call has ended."""
        while self._open_jobs:
            await self._waiting_for_idle.park()

    @property
    def has_waiting_calls(self) -> bool:
        """True if calls wait for a thread; long-running users of the pool should yield theirs."""
        return self.waiting > 0

    # -- Life cycle ----------------------------------------------------------------------------------------------------

    async def run(
        self, *, is_shielded: bool = True, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the threads until :meth:`close`; call with ``nursery.start``. Stuck threads are abandoned at the end.

        Cancellation: shielded unless ``is_shielded`` is False, because cancelled tasks need threads for cleanup; the
        owner must call :meth:`close`.
        """
        with current_resource_registry().threads(self, self._owner), trio.CancelScope() as scope:
            try:
                async with trio.open_nursery() as nursery:
                    self._loop = trio.lowlevel.current_trio_token()
                    self._nursery = nursery
                    task_status.started()
                    # A starter that was cancelled meanwhile does not know of the pool and would not close it.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    scope.shield = is_shielded
                    try:
                        await self._closing.wait()
                    finally:
                        self._nursery = None
                        for _ in range(self._places.close()):
                            self._queue.put(_Signal.END)
                    nursery.cancel_scope.deadline = trio.current_time() + self.grace_seconds
            finally:
                self._nursery = None
                self._closed.set()

    def close(self) -> None:
        """Refuse further calls and let :meth:`run` end."""
        self._closing.set()

    async def aclose(self) -> None:
        """Close the pool and wait until :meth:`run` has ended. May be called repeatedly, and before :meth:`run`."""
        self.close()
        if self._loop is not None:
            await self._closed.wait()

    # -- Calls ---------------------------------------------------------------------------------------------------------

    async def call(
        self,
        fn: Callable[[*_Ts], _T],
        *args: *_Ts,
        on_cancel: Callable[[], None] | None = None,
        context: contextvars.Context | None = None,
        is_abandonable: bool = False,
        discard: Callable[[_T], object] | None = None,
        start_timeout_seconds: float = math.inf,
    ) -> _T:
        """Run ``fn`` in a thread and return its result.

        Args:
            fn: blocking function.
            args: its arguments.
            on_cancel: called when the caller is cancelled while ``fn`` runs; should make ``fn`` end.
            context: context of ``fn``; default: a copy of the caller's.
            is_abandonable: a cancelled caller leaves ``fn`` running and its result is discarded.
            discard: called once with the discarded result, in the thread or here.
            start_timeout_seconds: maximum seconds to wait for a thread.

        Raises:
            BaseException: raised by ``fn`` or returned by ``refusal``.
            QueueTimeout: no thread was free in time; the call was dropped.
            RuntimeError: the pool is not running.

        Cancellation: a waiting call is dropped; a running one is waited for, shielded, for ``grace_seconds``, or left.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._refusal is not None and (refusal_error := self._refusal(self.abandoned)) is not None:
            raise refusal_error
        job = self.start(fn, *args, context=context, discard=discard)
        try:
            if start_timeout_seconds < math.inf and self.has_waiting_calls:
                await self._wait_for_start(start_timeout_seconds, job)
            await self._wait(job)
        except BaseException:
            if not self._withdraw(job):
                if on_cancel is not None:
                    on_cancel()
                if is_abandonable:
                    self._leave(job)
                else:
                    await self.finish(job)
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                # Break the reference cycle between this frame and the error's traceback.
                del job
        value: _T = job.value
        return value

    def start(
        self,
        fn: Callable[[*_Ts], Any],
        *args: *_Ts,
        on_done: Callable[[], None] | None = None,
        context: contextvars.Context | None = None,
        discard: Callable[[Any], object] | None = None,
    ) -> ThreadCall:
        """Start a call without waiting; the caller must wait for its end with :meth:`finish`.

        ``on_done`` is called on the event loop when the call has ended, unless it was abandoned. Raises
        ``RuntimeError`` if the pool is not running.
        """
        if self._nursery is None:
            raise RuntimeError("worker threads are not running: their owner is not loaded or was closed")
        if context is None:
            context = contextvars.copy_context()
        if self.names is not None:
            context.run(code_names.set, self.names)
        job = ThreadCall(fn, args, context, on_done, discard)
        self._open_jobs += 1
        self._queue.put(job)
        self._start_thread()
        return job

    async def finish(self, job: ThreadCall, seconds: float | None = None) -> bool:
        """Wait, shielded, for a call to end; after ``seconds`` (or ``grace_seconds``) abandon it and return False."""
        if not job.is_done and not job.is_abandoned:
            timeout_seconds = self.grace_seconds if seconds is None else seconds
            with trio.CancelScope(shield=True, deadline=trio.current_time() + timeout_seconds):
                await self._wait(job)
            self._abandon_thread(job)
        return job.is_done

    def wake(self, callback: Callable[[], None]) -> None:
        """Schedule a callback on the event loop, batched with others; thread-safe."""
        self._callbacks.append(callback)
        if not self._is_waking:
            self._is_waking = True
            loop = self._loop
            if loop is None:
                raise AssertionError("the pool was not started")
            try:
                loop.run_sync_soon(self._run_finished)
            except trio.RunFinishedError:
                # An abandoned thread may outlive the event loop.
                return

    # -- On the event loop ---------------------------------------------------------------------------------------------

    async def _wait(self, job: ThreadCall) -> None:
        if job.is_done:
            await trio.lowlevel.checkpoint()
            return
        job.waiter = trio.lowlevel.current_task()

        def abort(_raise_cancel: Any) -> trio.lowlevel.Abort:
            job.waiter = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _wait_for_start(self, seconds: float, job: ThreadCall) -> None:
        """Wait until the call has ended or started; raises ``QueueTimeout`` if it has not started after ``seconds``."""
        with trio.move_on_after(seconds) as scope:
            await self._wait(job)
        if scope.cancelled_caught and self._withdraw(job):
            raise QueueTimeout(seconds)

    def _run_finished(self) -> None:
        # A thread that still sees the flag set has added its callback before, so the loop below finds it.
        self._is_waking = False
        finished = self._callbacks
        while finished:
            finished.popleft()()

    def _complete(self, job: ThreadCall) -> None:
        if job.is_abandoned:
            return
        job.is_done = True
        self._count_ended()
        if job.is_left:
            self.abandoned -= 1
        waiter, job.waiter = job.waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)
        if job.on_done is not None:
            job.on_done()

    def _withdraw(self, job: ThreadCall) -> bool:
        """Drop a call that no thread has started; return whether it is dropped. Its queue entry is skipped later."""
        if job.is_abandoned:
            return True
        if not job.claim.acquire(blocking=False):
            return False
        job.is_abandoned = True
        self._count_ended()
        job.fn, job.args = (lambda: None), ()
        return True

    def _leave(self, job: ThreadCall) -> None:
        job.is_left = True
        self.abandoned += 1
        if self._on_leave is not None:
            self._on_leave(self.abandoned)
        job.meet()

    def _count_ended(self) -> None:
        self._open_jobs -= 1
        if not self._open_jobs and self._waiting_for_idle:
            self._waiting_for_idle.unpark_all()

    def _abandon_thread(self, job: ThreadCall) -> None:
        if job.is_done or self._withdraw(job) or self._is_strict:
            return
        job.is_abandoned = True
        self._count_ended()
        worker = job.worker
        if worker is not None and not worker.is_abandoned:
            self._places.give_up(worker)
            self._start_thread()
        log.warning("user code thread abandoned", stuck=self.stuck, limit=self._limit)

    def _start_thread(self) -> None:
        nursery = self._nursery
        if nursery is not None and self._places.reserve(self._open_jobs):
            nursery.start_soon(self._host, PoolThread(self._places), name="worker thread of user code")

    async def _host(self, worker: PoolThread) -> None:
        """Run one thread. On cancellation only stuck threads are left, which end after their call."""
        await trio.to_thread.run_sync(self._work, worker, abandon_on_cancel=True, limiter=self._limiter)
        self._places.end(worker)
        # A call may have been queued while the thread was ending.
        self._start_thread()

    # -- In worker threads ---------------------------------------------------------------------------------------------

    def _work(self, worker: PoolThread) -> None:
        self._places.begin(worker)
        with set_current_thread(worker):
            while worker.has_place and self._work_once(worker):
                if self._places.is_wanted:
                    self._places.hand_over(worker)

    def _work_once(self, worker: PoolThread) -> bool:
        """Run one call; return whether the thread should continue."""
        try:
            job = self._queue.get(timeout=self._idle_seconds)
        except queue.Empty:
            return False
        if isinstance(job, _Signal):
            return job is _Signal.LOOK
        if job.claim.acquire(blocking=False):
            job.worker = worker
            job.run()
            if os.getpid() != self._process:
                # User code has forked, and this is the child process.
                os._exit(0)
            self.wake(partial(self._complete, job))
        return True
