"""Dynamic batching: joins the items of concurrent callers into batches and returns each caller its own result."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog
import trio

from ovmstrio.core.errors import DeadlineExceeded, ModelFailure, NotReady, Overloaded, QueueTimeout
from ovmstrio.core.events import current_event
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.resource_registry import current_owner, current_resource_registry
from ovmstrio.core.tracing import Span, current_span
from ovmstrio.util.truncation import text_of

_T = TypeVar("_T")
_R = TypeVar("_R")


class _Pending: ...


_PENDING: Final = _Pending()


class BatchedCall(Generic[_T, _R]):
    """An item, its waiting caller and its result; compared by identity.

    ``run`` is the batch run, None while queued; ``is_left`` is true once the caller has left; ``span`` is the caller's.
    """

    __slots__ = ("_error", "_result", "_traceback", "arrived", "done", "is_left", "item", "run", "size", "span")

    def __init__(self, item: _T, size: int, arrived: float) -> None:
        self.item = item
        self.span = current_span.get()
        self.size = size
        self.arrived = arrived
        self.done = trio.Event()
        self.run: BatchRun[_T, _R] | None = None
        self.is_left = False
        self._result: _R | _Pending = _PENDING
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None

    def answer(self, result: _R | Exception) -> None:
        """Set the result, or the error to raise, and wake the caller."""
        if isinstance(result, Exception):
            self._error, self._traceback = result, result.__traceback__
        else:
            self._result = result
        self.done.set()

    def abandon(self) -> None:
        """Fail a call without a result with ``NotReady``."""
        if not self.done.is_set():
            self.answer(NotReady("the request was dropped: the service is shutting down"))

    def outcome(self) -> _R:
        """Return the result, or raise the item's error."""
        if self._error is not None:
            # Callers may share their batch's error; without a reset its traceback would grow with each raise.
            raise self._error.with_traceback(self._traceback)
        if isinstance(self._result, _Pending):
            raise AssertionError("outcome() called before the call was done")  # noqa: TRY004 - not a type error
        return self._result


class BatchRun(Generic[_T, _R]):
    """Calls whose items run together; ``scope`` is cancelled when all callers have left."""

    __slots__ = ("_wanted", "calls", "scope")

    def __init__(self, calls: Sequence[BatchedCall[_T, _R]]) -> None:
        self.calls = calls
        self.scope = trio.CancelScope()
        self._wanted = len(calls)
        for call in calls:
            call.run = self

    @property
    def size(self) -> int:
        """Sum of the item sizes."""
        return sum(call.size for call in self.calls)

    def fail(self, error: Exception) -> None:
        """Fail every call with the same error."""
        for call in self.calls:
            call.answer(error)

    def abandon(self) -> None:
        """Fail the calls without a result with ``NotReady``."""
        for call in self.calls:
            call.abandon()

    def begin(self) -> bool:
        """Drop the items whose callers have left; return False if none remain."""
        for call in self.calls:
            if call.is_left:
                call.abandon()
        self.calls = [call for call in self.calls if not call.is_left]
        return bool(self.calls)

    def leave(self) -> bool:
        """Record that one more caller left; return True for the last one, which cancels the run."""
        self._wanted -= 1
        if self._wanted == 0:
            self.scope.cancel()
        return self._wanted == 0


# ----------------------------------------------------------------------
# Batch spans
# ----------------------------------------------------------------------

_UNTRACED: Final = nullcontext()


def traced_batch(calls: Sequence[BatchedCall[Any, Any]], size: int) -> AbstractContextManager[object]:
    """Return a context that runs a batch under its own span, linked to the spans of its calls.

    The task may have been started by any caller, so its span and event are reset.  The batch span is a child of the
    first recorded call's span; each recorded call gets a ``queue`` span with its waiting time.
    """
    # The call that started this task may have ended already.
    current_span.set(None)
    current_event.set(None)
    recorded = []
    unrecorded = None
    for call in calls:
        span = call.span
        if span is not None:
            if span.is_recorded:
                recorded.append((call, span))
            else:
                unrecorded = unrecorded or span
    if recorded:
        return _recorded_batch(recorded, len(calls), size)
    return _UNTRACED if unrecorded is None else unrecorded.as_current()


@contextmanager
def _recorded_batch(recorded: Sequence[tuple[BatchedCall[Any, Any], Span]], calls: int, size: int) -> Iterator[None]:
    members = [span for _, span in recorded]
    batch = members[0].begin("batch", {"ovmstrio.batch.size": size, "ovmstrio.batch.calls": calls}, links=members)
    now = trio.current_time()
    for call, span in recorded:
        _record_waiting(span, batch, now - call.arrived)
    error: BaseException | None = None
    try:
        with batch.as_current():
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        batch.end(error)


def _record_waiting(span: Span, batch: Span, seconds: float) -> None:
    waited = span.begin("queue", {"ovmstrio.queue.of": "batch"}, seconds_ago=seconds)
    waited.link(batch)
    waited.end()


# ----------------------------------------------------------------------
# Batch policy
# ----------------------------------------------------------------------

_KeyT = TypeVar("_KeyT", bound=Hashable)

DEFAULT_QUEUE_SIZE: Final = 1024
"""Default queue length."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Batching parameters.

    Attributes:
        max_size: sum of sizes at which a batch is full; a larger item runs alone.
        timeout_seconds: longest wait of a batch's first item; infinite waits until the batch is full.
        max_waiting: queue length; further items are refused.
        eager: run a batch at once while no other batch runs.

    Raises:
        ValueError: a value is out of range.
    """

    max_size: int
    timeout_seconds: float
    max_waiting: int = DEFAULT_QUEUE_SIZE
    eager: bool = False

    def __post_init__(self) -> None:
        if self.max_size < 1 or self.max_waiting < 1 or not self.timeout_seconds >= 0:
            raise ValueError(f"max_size and max_waiting must be 1 or more and timeout_seconds 0 or more, got {self}")


class _QueuedItem(NamedTuple):
    key: Hashable
    size: int
    arrived: float
    number: int
    priority: int = 0

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Sort key: priority 1 before 2, 0 last; then the order of arrival."""
        return not self.priority, self.priority, self.number


class _Group(Generic[_KeyT]):
    __slots__ = ("items", "prioritized", "size")

    def __init__(self) -> None:
        self.items: OrderedDict[_KeyT, _QueuedItem] = OrderedDict()
        self.size = 0
        self.prioritized = 0

    @property
    def first(self) -> _QueuedItem:
        """The item to run first; linear in the number of items if some have priorities."""
        if self.prioritized:
            return min(self.items.values(), key=attrgetter("rank"))
        return next(iter(self.items.values()))

    def in_order(self) -> Iterable[tuple[_KeyT, _QueuedItem]]:
        """Return the items in the order to run them."""
        items = self.items.items()
        return sorted(items, key=lambda pair: pair[1].rank) if self.prioritized else items


class BatchPolicy(Generic[_KeyT]):
    """Decides which waiting items run together, and when; has neither tasks nor a clock.

    Every method takes constant time, except :meth:`take`, which is linear in the number of full groups, and in the
    number of queued items if some have priorities.
    """

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        self._places: OrderedDict[_KeyT, _QueuedItem] = OrderedDict()
        self._groups: dict[Hashable, _Group[_KeyT]] = {}
        self._full: dict[Hashable, _Group[_KeyT]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def arrive(self, item: _KeyT, key: Hashable, size: int, now: float, priority: int = 0) -> None:
        """Queue an item; items of different keys never share a batch; ``now`` must not decrease.

        Of items that can run, priority 1 runs before 2, and 0 last.

        Raises:
            Overloaded: the queue is full.
            ValueError: the size is below 1, or the item is queued already.
        """
        if size < 1 or item in self._places:
            raise ValueError(f"an item arrives once and has a size of 1 or more, got {size}")
        if len(self._places) >= self.options.max_waiting:
            raise Overloaded(
                f"The queue for batches is full: {len(self._places)} requests wait, as many as may; try again later"
            )
        place = self._places[item] = _QueuedItem(key, size, now, self._count, priority)
        self._count += 1
        group = self._groups.setdefault(key, _Group())
        group.items[item] = place
        group.size += size
        group.prioritized += priority > 0
        self._update_full(key, group)

    def leave(self, item: _KeyT) -> None:
        """Remove a queued item.

        Raises:
            KeyError: it is not queued.
        """
        self._remove(item)

    def take(self, now: float, *, idle: bool = False) -> list[_KeyT]:
        """Remove and return the batch to run now, empty if none is due.

        ``idle`` means that no batch runs.  With an infinite ``now``, every queued item is due.
        """
        group = self._due(now, idle=idle)
        if group is None:
            return []
        batch: list[_KeyT] = []
        left = self.options.max_size
        for item, place in group.in_order():
            if batch and place.size > left:
                break
            batch.append(item)
            left -= place.size
        for item in batch:
            self._remove(item)
        return batch

    def next_time(self, *, idle: bool = False) -> float:
        """Return when :meth:`take` will return a batch if nothing else happens; infinite if never."""
        if not self._places:
            return math.inf
        if self._full or (idle and self.options.eager):
            return -math.inf
        return self._oldest.arrived + self.options.timeout_seconds

    def clear(self) -> list[_KeyT]:
        """Remove all items and return them in order of arrival."""
        items = list(self._places)
        for item in items:
            self._remove(item)
        return items

    @property
    def _oldest(self) -> _QueuedItem:
        return next(iter(self._places.values()))

    def _due(self, now: float, *, idle: bool) -> _Group[_KeyT] | None:
        if not self._places:
            return None
        oldest = self._oldest
        # All items have the same timeout, so the oldest one expires first.
        if oldest.arrived + self.options.timeout_seconds <= now or (idle and self.options.eager):
            return self._groups[oldest.key]
        return min(self._full.values(), key=lambda group: group.first.rank, default=None)

    def _remove(self, item: _KeyT) -> None:
        place = self._places.pop(item)
        group = self._groups[place.key]
        del group.items[item]
        group.size -= place.size
        group.prioritized -= place.priority > 0
        if not group.items:
            del self._groups[place.key]
        self._update_full(place.key, group)

    def _update_full(self, key: Hashable, group: _Group[_KeyT]) -> None:
        if group.size >= self.options.max_size:
            self._full[key] = group
        else:
            self._full.pop(key, None)


RunBatch = Callable[[Sequence[_T]], Awaitable[Sequence[_R | Exception]]]
"""Runs items together and returns a result or an error for each, by position."""

log = structlog.get_logger(__name__)


class Batcher(Generic[_T, _R]):
    """Collects items and runs them in batches, while :meth:`serve` runs.

    Args:
        run: runs one batch.  An exception in its result is raised in that item's caller; one that it raises, in every
            caller of the batch.  It is cancelled when all callers of the batch have left.
        concurrency: number of batches that may run at once.
        retry_singly: run the items of a failed batch again one by one, so that only the faulty ones fail.
        hooks: notified of batch sizes and queue times.
    """

    def __init__(
        self,
        run: RunBatch[_T, _R],
        options: BatchOptions,
        *,
        concurrency: int = 1,
        retry_singly: bool = False,
        hooks: BatchHooks = NULL_BATCH_HOOKS,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be 1 or more, got {concurrency}")
        self._run = run
        self._policy: BatchPolicy[BatchedCall[_T, _R]] = BatchPolicy(options)
        self._concurrency = concurrency
        self._retry_singly = retry_singly
        self._hooks = hooks
        self._running = 0
        self._nursery: trio.Nursery | None = None
        self._alarm = trio.CancelScope()
        self._closing = False
        self._ended = trio.Event()

    @property
    def waiting(self) -> int:
        """Number of queued items."""
        return len(self._policy)

    @property
    def running(self) -> int:
        """Number of running batches."""
        return self._running

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run batches until :meth:`aclose` is called and the last one has ended; callable once.

        Exceptions of ``run`` go to the callers.  Cancellation cancels running batches and fails waiting callers with
        ``NotReady``.
        """
        try:
            with current_resource_registry().batcher(self, current_owner.get()):
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    task_status.started()
                    await self._watch_clock()
        finally:
            self._ended.set()

    async def submit(
        self,
        item: _T,
        *,
        key: Hashable = None,
        size: int = 1,
        deadline: float = math.inf,
        start_within: float = math.inf,
        priority: int = 0,
    ) -> _R:
        """Run an item in a batch with others of the same key, and return its result.

        When this returns, the item is no longer accessed, unless other callers of its batch still wait.  Cancellation
        removes a queued item and drops the result of a running one; for the last caller of a batch, it cancels ``run``
        and waits for it.

        ``key`` separates batches, ``size`` counts towards ``max_size``, ``deadline`` is absolute on trio's clock, and
        ``start_within`` is the longest wait in seconds for the start of a batch. ``priority`` is as in
        :meth:`BatchPolicy.arrive`.

        Raises:
            Overloaded: the queue is full.
            QueueTimeout: no batch started in time.
            DeadlineExceeded: the deadline passed first.
            NotReady: the batcher was cancelled.
            trio.ClosedResourceError: the batcher is closed.
            ModelFailure: ``run`` returned the wrong number of results.
            Exception: the item's error.
        """
        if self._closing:
            raise trio.ClosedResourceError
        call: BatchedCall[_T, _R] = BatchedCall(item, size, trio.current_time())
        self._policy.arrive(call, key, size, call.arrived, priority)
        self._dispatch()
        with trio.move_on_at(deadline) as scope:
            try:
                if start_within < math.inf:
                    await self._wait_for_start(start_within, call)
                await call.done.wait()
            except trio.Cancelled:
                await self._leave(call)
                raise
        if scope.cancelled_caught:
            raise DeadlineExceeded("the deadline passed before the request's batch had run")
        return call.outcome()

    def flush(self) -> None:
        """Run queued items without further delay, within ``concurrency``."""
        self._dispatch(math.inf)

    async def aclose(self) -> None:
        """Accept no more items, run queued items without delay, and return when the last batch has ended."""
        self._closing = True
        if self._nursery is None:
            self._abandon_queued()
            return
        self._dispatch()
        self._alarm.cancel()
        await self._ended.wait()

    async def _watch_clock(self) -> None:
        try:
            while not self._closing:
                self._dispatch()
                with trio.CancelScope(deadline=self._next_time()) as self._alarm:
                    await trio.sleep_forever()
        except trio.Cancelled:
            self._abandon_queued()
            raise

    def _dispatch(self, now: float | None = None) -> None:
        """Start every batch that is due, and set the alarm for the next one."""
        if self._nursery is None or self._ended.is_set():
            return
        if now is None:
            now = math.inf if self._closing else trio.current_time()
        while self._running < self._concurrency:
            calls = self._policy.take(now, idle=self._running == 0)
            if not calls:
                break
            self._running += 1
            self._nursery.start_soon(self._serve_batch, BatchRun(calls))
        self._alarm.deadline = self._next_time()

    def _next_time(self) -> float:
        if self._running >= self._concurrency:
            return math.inf
        return self._policy.next_time(idle=self._running == 0)

    def _abandon_queued(self) -> None:
        self._closing = True
        for call in self._policy.clear():
            call.abandon()

    async def _wait_for_start(self, seconds: float, call: BatchedCall[_T, _R]) -> None:
        with trio.move_on_after(seconds) as scope:
            await call.done.wait()
        if scope.cancelled_caught and call.run is None and not call.done.is_set():
            call.is_left = True
            self._policy.leave(call)
            raise QueueTimeout(seconds)

    async def _leave(self, call: BatchedCall[_T, _R]) -> None:
        call.is_left = True
        if call.done.is_set():
            return
        if call.run is None:
            self._policy.leave(call)
        elif call.run.leave():
            with trio.CancelScope(shield=True):
                await call.done.wait()

    async def _serve_batch(self, run: BatchRun[_T, _R]) -> None:
        try:
            if run.begin():
                self._report(run)
                with traced_batch(run.calls, run.size):
                    await self._attempt(run)
        except BaseException:  # cancellation of the batcher; attempts raise nothing else
            self._abandon_queued()
            raise
        finally:
            run.abandon()
            self._running -= 1
            self._dispatch()

    def _report(self, run: BatchRun[_T, _R]) -> None:
        now = trio.current_time()
        self._hooks.batch_size(run.size)
        for call in run.calls:
            self._hooks.queue_time(now - call.arrived)

    async def _attempt(self, run: BatchRun[_T, _R]) -> None:
        results: Sequence[_R | Exception] = ()
        with run.scope:
            try:
                results = await self._run([call.item for call in run.calls])
            except Exception as error:  # noqa: BLE001 - raised in the callers
                if self._retry_singly and len(run.calls) > 1:
                    await self._attempt_singly(run, error)
                else:
                    run.fail(error)
                return
        if run.scope.cancelled_caught:
            run.abandon()
        else:
            _distribute(run, results)

    async def _attempt_singly(self, run: BatchRun[_T, _R], error: Exception) -> None:
        log.warning("batch failed, requests retried singly", requests=len(run.calls), reason=text_of(error))
        for call in run.calls:
            if not call.is_left:
                await self._attempt(BatchRun([call]))


def _distribute(run: BatchRun[_T, _R], results: Any) -> None:
    calls = run.calls
    if isinstance(results, Sequence) and not isinstance(results, str | bytes) and len(results) == len(calls):
        for call, result in zip(calls, results, strict=True):
            call.answer(result)
        return
    found = f"a list of {len(results)}" if isinstance(results, list) else type(results).__name__
    message = f"batch function returned a wrong result: expected a list of {len(calls)}, got {found}"
    log.error("batch result rejected", requests=len(calls), found=found)
    run.fail(ModelFailure(message))


@asynccontextmanager
async def open_batcher(
    run: RunBatch[_T, _R],
    options: BatchOptions,
    *,
    concurrency: int = 1,
    retry_singly: bool = False,
    hooks: BatchHooks = NULL_BATCH_HOOKS,
) -> AsyncIterator[Batcher[_T, _R]]:
    """Open a batcher with its own nursery; the arguments are those of :class:`Batcher`.

    Leaving the block runs queued items and waits for them.  An error of the block cancels everything, and is raised in
    an exception group.
    """
    batcher = Batcher(run, options, concurrency=concurrency, retry_singly=retry_singly, hooks=hooks)
    async with trio.open_nursery() as nursery:
        await nursery.start(batcher.serve)
        yield batcher
        await batcher.aclose()
