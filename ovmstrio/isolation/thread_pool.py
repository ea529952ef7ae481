"""Threads for blocking user code, cheaper for each call than a thread hop of trio's.

::

    start ──> SimpleQueue ──> worker thread ──> deque of finished jobs ──> one wake-up of the event loop for all of them

A worker is a loop inside ``trio.to_thread.run_sync``, hosted by a task of the pool, so that no thread lives outside
the tree of tasks.  Workers are started when there is more to do than there are workers, and end when they have had
nothing to do for some seconds.  One that does not come back although its caller has left is given up: it counts as
stuck, another takes its place, and the pool ends without it.  Or callers leave their calls at once: these are counted
as abandoned, what they give is discarded once, and so many of them may be reason to refuse others.  Calls that wait
for something else may lend their places meanwhile (``lending.py``).
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
from ovmstrio.core.resource_registry import current_census, current_owner
from ovmstrio.util.stdio import code_names, finish_lines

__all__ = [
    "GRACE_SECONDS",
    "Places",
    "PoolThread",
    "Refusal",
    "ThreadCall",
    "WorkerThreads",
    "lent_place",
    "running_as",
]

# ----------------------------------------------------------------------
# Which threads of a pool may run calls, and how one that only waits lends its place to another
# ----------------------------------------------------------------------


class PoolThread:
    """One thread of a pool.

    Args:
        places: of its pool.

    Attributes:
        is_abandoned: whether nobody waits any more for what it does.
        has_place: whether it counts among those that may run calls.
        is_lent: whether it waits for something else, and another may have its place.
        gate: opens when it has its place back; None while it does not wait for that.
    """

    __slots__ = ("gate", "has_place", "is_abandoned", "is_lent", "places")

    def __init__(self, places: Places) -> None:
        self.places = places
        self.is_abandoned = False
        self.has_place = False
        self.is_lent = False
        self.gate: threading.Semaphore | None = None


class Places:
    """The places of one pool; given and taken in threads, too, as the event loop may be what waits for one of them.

    Args:
        limit: how many there are.
        look: has a thread that is idle look whether somebody wants a place back; from any thread.
        lent: is told that a place has been lent; from any thread.

    Attributes:
        stuck: threads that were given up and still run.
    """

    def __init__(self, limit: int, look: Callable[[], None], lent: Callable[[], None]) -> None:
        self.stuck = 0
        self._limit = limit
        self._look = look
        self._tell_lent = lent
        self._lock = threading.Lock()
        self._taken = 0
        self._starting = 0
        self._lent = 0
        self._returning: deque[PoolThread] = deque()
        self._is_over = False

    @property
    def taken(self) -> int:
        """How many places have threads that may run calls, or are about to."""
        return self._taken + self._starting

    @property
    def lent(self) -> int:
        """How many threads wait for something else."""
        return self._lent

    @property
    def is_wanted(self) -> bool:
        """Whether somebody wants a place back."""
        return bool(self._returning)

    def reserve(self, calls: int) -> bool:
        """Keep a place for another thread, if so many calls, with those that wait, need one and it may be started."""
        # Seldom any is, and whatever frees a place asks again.
        if calls <= self._taken + self._starting:
            return False
        with self._lock:
            there = self._taken + self._starting
            is_needed = calls - self._lent - len(self._returning) > there
            if not is_needed or there >= self._limit or there + self.stuck >= 2 * self._limit:
                return False
            self._starting += 1
            return True

    def begin(self, thread: PoolThread) -> None:
        """Take the place that was kept, unless somebody has got it back meanwhile; called in the thread."""
        with self._lock:
            self._starting -= 1
            if self._taken < self._limit:
                self._admit(thread)

    def end(self, thread: PoolThread) -> None:
        """Free the place of a thread that has ended."""
        with self._lock:
            if thread.is_abandoned:
                self.stuck -= 1
            elif thread.has_place:
                self._free(thread)

    def give_up(self, thread: PoolThread) -> None:
        """Count a thread as stuck, wherever it is; it needs no place any more."""
        with self._lock:
            thread.is_abandoned = True
            self.stuck += 1
            if thread.has_place:
                self._free(thread)
            elif thread.is_lent:
                self._lent -= 1
            elif thread.gate is not None:
                self._returning.remove(thread)
                thread.gate.release()

    def close(self) -> int:
        """Give places to all who want one; tells how many threads there are then."""
        with self._lock:
            self._is_over = True
            while self._returning:
                self._admit(self._returning.popleft())
            return self._taken + self._starting + self._lent + self.stuck

    # In the threads

    def lend(self, thread: PoolThread) -> None:
        """Let others have the place of a thread until :meth:`take_back`."""
        with self._lock:
            thread.is_lent = True
            if thread.is_abandoned:
                return
            self._lent += 1
            self._free(thread)
        self._tell_lent()

    def take_back(self, thread: PoolThread) -> None:
        """Wait until a thread has a place again, unless it was given up."""
        with self._lock:
            thread.is_lent = False
            if thread.is_abandoned:
                return
            self._lent -= 1
            if self._is_over or self._taken < self._limit:
                self._admit(thread)
                return
            gate = thread.gate = threading.Semaphore(0)
            self._returning.append(thread)
        self._look()
        gate.acquire()

    def hand_over(self, thread: PoolThread) -> None:
        """Give the place of a thread that has ended its call to the first that wants one back."""
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


class _Here(threading.local):
    """Which thread of a pool this is, None for all others."""

    thread: PoolThread | None = None


_here: Final = _Here()


@contextmanager
def running_as(thread: PoolThread) -> Iterator[None]:
    """Be a thread of a pool within the block."""
    _here.thread = thread
    try:
        yield
    finally:
        _here.thread = None


@contextmanager
def lent_place() -> Iterator[None]:
    """Lend this thread's place to other calls of its pool while the block waits; in other threads do nothing.

    Whoever lends sees to it that not too many do, as each of them keeps its thread.  No lock may be held when the block
    ends that another call waits for in its place, for the end waits for a place.
    """
    thread = _here.thread
    if thread is None or thread.is_lent:
        yield
        return
    thread.places.lend(thread)
    try:
        yield
    finally:
        thread.places.take_back(thread)


# ----------------------------------------------------------------------
# Threads for blocking user code, cheaper for each call than a thread hop of trio's
# ----------------------------------------------------------------------

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

log = structlog.get_logger(__name__)

GRACE_SECONDS: Final = 2.0
"""How long user code that was told to stop may go on before its thread is given up."""
_LIMIT: Final = 64
_IDLE_SECONDS: Final = 10.0

Refusal = Callable[[int], Exception | None]
"""Gives why there can be no further call while so many go on whose callers have left; None if there can."""


class _Signal(enum.Enum):
    """What threads find in their queue besides calls."""

    END = enum.auto()
    LOOK = enum.auto()
    """Somebody may want a place back."""


class ThreadCall:
    """One call that was handed to the pool."""

    __slots__ = (
        "args",
        "claim",
        "context",
        "discard",
        "error",
        "fn",
        "is_abandoned",
        "is_done",
        "is_left",
        "meeting",
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
        self.meeting = None if discard is None else threading.Lock()
        self.value: Any = None
        self.error: BaseException | None = None
        self.worker: PoolThread | None = None
        self.waiter: trio.lowlevel.Task | None = None
        self.is_done = False
        self.is_left = False
        self.is_abandoned = False

    def run(self) -> None:
        """Make the call, in a worker thread; whatever it raises is kept for whoever waits, ``SystemExit`` too."""
        try:
            self.value = self.context.run(self._called)
            self.meet()
        except BaseException as error:  # noqa: BLE001 - as said
            self.error = error

    def _called(self) -> Any:
        try:
            return self.fn(*self.args)
        finally:
            finish_lines()

    def meet(self) -> None:
        """Discard what the call gave, if the other one has been here: the thread that made it, or who left it."""
        if self.discard is not None and self.meeting is not None and not self.meeting.acquire(blocking=False):
            self.discard(self.value)


class WorkerThreads:
    """A pool of threads for the blocking calls of one loaded graph or handler.

    Args:
        limit: how many calls may run at once; others wait in a queue, in the order in which they came.
        grace_seconds: how long a call whose caller has left is waited for.
        idle_seconds: after how long without work a thread ends; None for never.
        is_strict: whether a thread that does not come back keeps its place, so that there are never more threads than
            ``limit``, and always the same ones if none goes idle.
        refusal: says whether there may be another call, after callers have left theirs.
        told_of_leaving: is told how many calls go on whose callers have left, whenever one more does.
        names: say in the log whose code prints there, where not the caller's context does.

    Attributes:
        names: as above.
        abandoned: calls that go on although their callers have left them.
    """

    def __init__(
        self,
        limit: int = _LIMIT,
        grace_seconds: float = GRACE_SECONDS,
        idle_seconds: float | None = _IDLE_SECONDS,
        *,
        is_strict: bool = False,
        refusal: Refusal | None = None,
        told_of_leaving: Callable[[int], object] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.abandoned = 0
        self.names = names
        self._owner = current_owner.get()
        self._refusal = refusal
        self._told_of_leaving = told_of_leaving
        self._is_strict = is_strict
        self._limit = limit
        self.grace_seconds = grace_seconds
        self._idle_seconds = idle_seconds
        self._queue: queue.SimpleQueue[ThreadCall | _Signal] = queue.SimpleQueue()
        self._finished: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._open_jobs = 0
        self._process = os.getpid()
        self._places = Places(limit, partial(self._queue.put, _Signal.LOOK), partial(self.wake, self._hire))
        self._nursery: trio.Nursery | None = None
        self._loop: trio.lowlevel.TrioToken | None = None
        self._limiter = trio.CapacityLimiter(math.inf)
        self._closing = trio.Event()
        self._closed = trio.Event()
        self._waiting_for_idle = trio.lowlevel.ParkingLot()

    @property
    def stuck(self) -> int:
        """How many threads were given up and still run; with them there are at most twice ``limit``."""
        return self._places.stuck

    @property
    def threads(self) -> int:
        """How many threads there are, without those that are stuck."""
        return self._places.taken + self._places.lent

    @property
    def waiting(self) -> int:
        """How many calls wait for a thread."""
        return max(0, self._open_jobs - self._places.lent - self._limit)

    @property
    def is_busy(self) -> bool:
        """Whether a call has not ended, with those whose callers have left."""
        return self._open_jobs > 0

    async def idle(self) -> None:
        """Wait until every call has ended.

        Cancellation: at once.
        """
        while self._open_jobs:
            await self._waiting_for_idle.park()

    @property
    def is_crowded(self) -> bool:
        """Whether calls wait for a thread; those who could go on later had better let them."""
        return self.waiting > 0

    # Life

    async def run(
        self, *, is_shielded: bool = True, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Host the threads until :meth:`close`; to be started with ``nursery.start``.

        Ownership: all threads of the pool; those that are stuck ``grace_seconds`` after the end are left behind.

        Cancellation: shielded, because those who are cancelled need threads for cleaning up; whoever starts this must
        close the pool.  Unless it ``is_shielded`` it ends at once, and leaves threads behind that are busy.
        """
        with current_census().threads(self, self._owner), trio.CancelScope() as scope:
            try:
                async with trio.open_nursery() as nursery:
                    self._loop = trio.lowlevel.current_trio_token()
                    self._nursery = nursery
                    task_status.started()
                    # Whoever was cancelled while this started knows nothing of it, and would not close it.
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
        """Take no more calls and let :meth:`run` end, without waiting for that."""
        self._closing.set()

    async def aclose(self) -> None:
        """End all threads, and return when :meth:`run` has ended.  May be called twice, and before :meth:`run`.

        Cancellation: at once; the threads end all the same.
        """
        self.close()
        if self._loop is not None:
            await self._closed.wait()

    # Calls

    async def call(
        self,
        fn: Callable[[*_Ts], _T],
        *args: *_Ts,
        on_cancel: Callable[[], None] | None = None,
        context: contextvars.Context | None = None,
        may_leave: bool = False,
        discard: Callable[[_T], object] | None = None,
        start_within: float = math.inf,
    ) -> _T:
        """Call ``fn`` in a thread and give what it returns.

        Args:
            fn: the blocking function.
            args: its arguments.
            on_cancel: called when the caller is cancelled while ``fn`` runs; should make ``fn`` end.
            may_leave: whether a caller that is cancelled leaves ``fn`` running in its thread, and its result to nobody.
            discard: gets what a call gives whose caller has left it, once: in its thread, or here if that is done.
            context: the context that ``fn`` runs in, a copy of the caller's by default.
            start_within: for how many seconds the call may wait for a thread.

        Raises:
            BaseException: whatever ``fn`` raises; or what the pool's ``refusal`` gives.
            QueueTimeout: no thread has begun the call in time, and none will.
            RuntimeError: the pool does not run.

        Ownership: the call; it has ended, or its thread was given up, when this returns, unless it ``may_leave``.

        Cancellation: a call that waits for a thread is dropped; one that runs is waited for, shielded, for
        ``grace_seconds``, or left.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._refusal is not None and (refused := self._refusal(self.abandoned)) is not None:
            raise refused
        job = self.start(fn, *args, context=context, discard=discard)
        try:
            if start_within < math.inf and self.is_crowded:
                await self._begin_within(start_within, job)
            await self._wait(job)
        except BaseException:
            if not self._withdraw(job):
                if on_cancel is not None:
                    on_cancel()
                if may_leave:
                    self._leave(job)
                else:
                    await self.finish(job)
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                # The error's traceback has this frame, which must not have the error.
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
        """Hand a call over without waiting for it; the caller must see to its end with :meth:`finish`.

        ``on_done`` is called on the event loop when the call has ended, unless it was given up.

        Raises:
            RuntimeError: the pool does not run.
        """
        if self._nursery is None:
            raise RuntimeError("the worker threads do not run: what they belong to is not loaded yet, or was closed")
        if context is None:
            context = contextvars.copy_context()
        if self.names is not None:
            context.run(code_names.set, self.names)
        job = ThreadCall(fn, args, context, on_done, discard)
        self._open_jobs += 1
        self._queue.put(job)
        self._hire()
        return job

    async def finish(self, job: ThreadCall, seconds: float | None = None) -> bool:
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
            loop = self._loop
            if loop is None:
                raise AssertionError("a thread of a pool that has never run")
            try:
                loop.run_sync_soon(self._run_finished)
            except trio.RunFinishedError:
                # A thread that was given up may outlive the event loop.
                return

    # On the event loop

    async def _wait(self, job: ThreadCall) -> None:
        if job.is_done:
            await trio.lowlevel.checkpoint()
            return
        job.waiter = trio.lowlevel.current_task()

        def abort(_raise_cancel: Any) -> trio.lowlevel.Abort:
            job.waiter = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _begin_within(self, seconds: float, job: ThreadCall) -> None:
        """Wait for a call until it is done, or has begun and the time is over.

        Raises:
            QueueTimeout: it has not begun in time, and will not.
        """
        with trio.move_on_after(seconds) as scope:
            await self._wait(job)
        if scope.cancelled_caught and self._withdraw(job):
            raise QueueTimeout(seconds)

    def _run_finished(self) -> None:
        # A thread that still sees the flag has put its callback into the queue before, so that it is found below.
        self._is_waking = False
        finished = self._finished
        while finished:
            finished.popleft()()

    def _settle(self, job: ThreadCall) -> None:
        if job.is_abandoned:
            return
        job.is_done = True
        self._forget()
        if job.is_left:
            self.abandoned -= 1
        waiter, job.waiter = job.waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)
        if job.on_done is not None:
            job.on_done()

    def _withdraw(self, job: ThreadCall) -> bool:
        """Take back a call that no thread has begun; it stays in the queue, and whoever finds it there drops it."""
        if job.is_abandoned:
            return True
        if not job.claim.acquire(blocking=False):
            return False
        job.is_abandoned = True
        self._forget()
        job.fn, job.args = _nothing, ()
        return True

    def _leave(self, job: ThreadCall) -> None:
        job.is_left = True
        self.abandoned += 1
        if self._told_of_leaving is not None:
            self._told_of_leaving(self.abandoned)
        job.meet()

    def _forget(self) -> None:
        self._open_jobs -= 1
        if not self._open_jobs and self._waiting_for_idle:
            self._waiting_for_idle.unpark_all()

    def _give_up(self, job: ThreadCall) -> None:
        if job.is_done or self._withdraw(job) or self._is_strict:
            return
        job.is_abandoned = True
        self._forget()
        worker = job.worker
        if worker is not None and not worker.is_abandoned:
            self._places.give_up(worker)
            self._hire()
        log.warning("user code does not end; its thread was given up", stuck=self.stuck, limit=self._limit)

    def _hire(self) -> None:
        nursery = self._nursery
        if nursery is not None and self._places.reserve(self._open_jobs):
            nursery.start_soon(self._host, PoolThread(self._places), name="worker thread of user code")

    async def _host(self, worker: PoolThread) -> None:
        """Own one thread.

        Cancellation: at once; only stuck threads are left then, and they end with what they do.
        """
        await trio.to_thread.run_sync(self._work, worker, abandon_on_cancel=True, limiter=self._limiter)
        self._places.end(worker)
        # A call may have come while the thread was leaving.
        self._hire()

    # In the threads

    def _work(self, worker: PoolThread) -> None:
        self._places.begin(worker)
        with running_as(worker):
            while worker.has_place and self._work_once(worker):
                if self._places.is_wanted:
                    self._places.hand_over(worker)

    def _work_once(self, worker: PoolThread) -> bool:
        """Make a call; False if there is to be no other."""
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
                # Code of users has forked, and this is the child, which has come back from there.
                os._exit(0)
            self.wake(partial(self._settle, job))
        return True


def _nothing() -> None:
    """Stand for a call that was taken back."""
