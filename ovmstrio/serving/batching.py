"""Joins the items of many callers into batches, and gives each caller the result of its own item."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog
import trio

from ovmstrio.core.errors import DeadlineExceeded, ModelFailure, NotReady, Overloaded, QueueTimeout
from ovmstrio.core.events import current_event
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.resource_registry import current_census, current_owner
from ovmstrio.core.tracing import Span, current_span
from ovmstrio.util.truncation import text_of

__all__ = [
    "DEFAULT_MAX_WAITING",
    "BatchOptions",
    "BatchPolicy",
    "BatchRun",
    "BatchedCall",
    "Batcher",
    "RunBatch",
    "open_batcher",
    "traced_batch",
]

# ----------------------------------------------------------------------
# One caller's item on its way through a batcher, and one run of a batch
# ----------------------------------------------------------------------

_T = TypeVar("_T")
_R = TypeVar("_R")


class _Nothing:
    """Stands for a result that is not there yet."""


_NOTHING: Final = _Nothing()


class BatchedCall(Generic[_T, _R]):
    """An item, who waits for its result, and that result; equal to itself alone.

    ``run`` is the run that it is part of, None while it waits for one; ``is_left`` tells that nobody waits any more.
    ``span`` is that of its caller, where that is traced.
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
        self._result: _R | _Nothing = _NOTHING
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None

    def answer(self, result: _R | Exception) -> None:
        """Give the caller its result, or the error to raise."""
        if isinstance(result, Exception):
            self._error, self._traceback = result, result.__traceback__
        else:
            self._result = result
        self.done.set()

    def abandon(self) -> None:
        """Tell a caller without an answer that there will be none."""
        if not self.done.is_set():
            self.answer(NotReady("the request was dropped before it was answered: what serves it is being stopped"))

    def outcome(self) -> _R:
        """Return the result.

        Raises:
            Exception: the error that is the item's outcome.
        """
        if self._error is not None:
            # Callers may share the error of their batch, and its traceback must not grow with each of them.
            raise self._error.with_traceback(self._traceback)
        if isinstance(self._result, _Nothing):
            raise AssertionError("a call was asked for its result before it was done")  # noqa: TRY004 - not of types
        return self._result


class BatchRun(Generic[_T, _R]):
    """Calls whose items run together; ``scope`` is cancelled when none of them is wanted any more."""

    __slots__ = ("_wanted", "calls", "scope")

    def __init__(self, calls: Sequence[BatchedCall[_T, _R]]) -> None:
        self.calls = calls
        self.scope = trio.CancelScope()
        self._wanted = len(calls)
        for call in calls:
            call.run = self

    @property
    def size(self) -> int:
        """The sum of the items' sizes."""
        return sum(call.size for call in self.calls)

    def fail(self, error: Exception) -> None:
        """Give every caller the same error."""
        for call in self.calls:
            call.answer(error)

    def abandon(self) -> None:
        """Tell the callers without an answer that there will be none."""
        for call in self.calls:
            call.abandon()

    def begin(self) -> bool:
        """Leave out the items whose callers have gone since the batch was made; false if there are no others."""
        for call in self.calls:
            if call.is_left:
                call.abandon()
        self.calls = [call for call in self.calls if not call.is_left]
        return bool(self.calls)

    def leave(self) -> bool:
        """Note that one more caller is gone; true if it was the last one, for whom the run is cancelled."""
        self._wanted -= 1
        if self._wanted == 0:
            self.scope.cancel()
        return self._wanted == 0


# ----------------------------------------------------------------------
# The span of a batch, which is a part of its first member's call and linked to all of them
# ----------------------------------------------------------------------

_UNTRACED: Final = nullcontext()


def traced_batch(calls: Sequence[BatchedCall[Any, Any]], size: int) -> AbstractContextManager[object]:
    """Run a batch in the block, in a task that any of its members, or none, has begun.

    Members that are recorded have a part that tells how long they waited, and is linked to the batch.
    """
    # Whoever began this task may be a call that has ended long ago.
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
        _tell_waiting(span, batch, now - call.arrived)
    error: BaseException | None = None
    try:
        with batch.as_current():
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        batch.end(error)


def _tell_waiting(span: Span, batch: Span, seconds: float) -> None:
    waited = span.begin("queue", {"ovmstrio.queue.of": "batch"}, seconds_ago=seconds)
    waited.link(batch)
    waited.end()


# ----------------------------------------------------------------------
# When batches leave and who is in them: a policy without tasks and without a clock
# ----------------------------------------------------------------------

_KeyT = TypeVar("_KeyT", bound=Hashable)

DEFAULT_MAX_WAITING: Final = 1024
"""How many items may wait unless something else is said."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How batches are made.

    Attributes:
        max_size: the sum of sizes at which a batch is full; an item that is larger runs alone.
        timeout_seconds: how long the first item of a batch waits for others; infinite waits until the batch is full.
        max_waiting: how many items may wait; more are refused.
        eager: whether a batch leaves at once while nothing else is running.
    """

    max_size: int
    timeout_seconds: float
    max_waiting: int = DEFAULT_MAX_WAITING
    eager: bool = False

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: a bound is below its least value, or not a number.
        """
        if self.max_size < 1 or self.max_waiting < 1 or not self.timeout_seconds >= 0:
            raise ValueError(f"max_size and max_waiting must be 1 or more and timeout_seconds 0 or more, got {self}")


class _QueuedItem(NamedTuple):
    key: Hashable
    size: int
    arrived: float
    number: int


class _Group(Generic[_KeyT]):
    """The items of one key, in the order of arrival, and the sum of their sizes."""

    __slots__ = ("items", "size")

    def __init__(self) -> None:
        self.items: OrderedDict[_KeyT, _QueuedItem] = OrderedDict()
        self.size = 0

    @property
    def first(self) -> _QueuedItem:
        """The place of the first item; there is one."""
        return next(iter(self.items.values()))


class BatchPolicy(Generic[_KeyT]):
    """Decides which of the waiting items run together, and when; items are told apart by hash and equality.

    Every method but :meth:`take` takes the same time however many items wait; that one looks at each group that is
    full.
    """

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        self._places: OrderedDict[_KeyT, _QueuedItem] = OrderedDict()
        self._groups: dict[Hashable, _Group[_KeyT]] = {}
        self._full: dict[Hashable, _Group[_KeyT]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def arrive(self, item: _KeyT, key: Hashable, size: int, now: float) -> None:
        """Let an item wait behind those of the same key; ``now`` is never less than before.

        Raises:
            Overloaded: as many items wait as may.
            ValueError: the size is below 1, or the item is waiting already.
        """
        if size < 1 or item in self._places:
            raise ValueError(f"an item arrives once and has a size of 1 or more, got {size}")
        if len(self._places) >= self.options.max_waiting:
            raise Overloaded(
                f"The queue for batches is full: {len(self._places)} requests wait, as many as may; try again later"
            )
        place = self._places[item] = _QueuedItem(key, size, now, self._count)
        self._count += 1
        group = self._groups.setdefault(key, _Group())
        group.items[item] = place
        group.size += size
        self._note(key, group)

    def leave(self, item: _KeyT) -> None:
        """Forget an item that waits and is not wanted any more.

        Raises:
            KeyError: it does not wait.
        """
        self._remove(item)

    def take(self, now: float, *, idle: bool = False) -> list[_KeyT]:
        """Take the batch that is to run now, nothing if none is; called when there is somebody to run it.

        ``idle`` tells that nothing else is running.  At an infinite time, whatever waits may leave.
        """
        group = self._due(now, idle=idle)
        if group is None:
            return []
        batch: list[_KeyT] = []
        left = self.options.max_size
        for item, place in group.items.items():
            if batch and place.size > left:
                break
            batch.append(item)
            left -= place.size
        for item in batch:
            self._remove(item)
        return batch

    def next_time(self, *, idle: bool = False) -> float:
        """Tell from when on :meth:`take` will give a batch if nothing else happens; infinite if never."""
        if not self._places:
            return math.inf
        if self._full or (idle and self.options.eager):
            return -math.inf
        return self._oldest.arrived + self.options.timeout_seconds

    def clear(self) -> list[_KeyT]:
        """Forget every item, and give them in the order of arrival."""
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
        # Every item may wait equally long, so that the oldest of all is the first whose time is over.
        if oldest.arrived + self.options.timeout_seconds <= now or (idle and self.options.eager):
            return self._groups[oldest.key]
        return min(self._full.values(), key=lambda group: group.first.number, default=None)

    def _remove(self, item: _KeyT) -> None:
        place = self._places.pop(item)
        group = self._groups[place.key]
        del group.items[item]
        group.size -= place.size
        if not group.items:
            del self._groups[place.key]
        self._note(place.key, group)

    def _note(self, key: Hashable, group: _Group[_KeyT]) -> None:
        if group.size >= self.options.max_size:
            self._full[key] = group
        else:
            self._full.pop(key, None)


# ----------------------------------------------------------------------
# Joins the items of many callers into batches, and gives each caller the result of its own item
# ----------------------------------------------------------------------

RunBatch = Callable[[Sequence[_T]], Awaitable[Sequence[_R | Exception]]]
"""Runs items together and gives a result, or an error, for each of them by its position."""

log = structlog.get_logger(__name__)


class Batcher(Generic[_T, _R]):
    """Collects items and runs them in batches, while :meth:`serve` runs.

    Args:
        run: runs one batch.  An exception in what it returns is raised in that item's caller alone; one that it raises
            is raised in each caller of the batch.  It is cancelled when no caller of the batch is left.
        options: how batches are made.
        concurrency: how many batches may run at once.
        retry_singly: run the items of a batch that failed again, one by one, so that only those fail that are at fault.
        hooks: are told of batches.
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
        """How many items wait for their batch."""
        return len(self._policy)

    @property
    def running(self) -> int:
        """How many batches run."""
        return self._running

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the batches until :meth:`aclose` is called and the last one has ended; may be run once.

        Raises: nothing that ``run`` raises as an ``Exception``; that is for the callers.

        Cancellation: at any checkpoint; batches are cancelled, and whoever still waits gets ``NotReady``.
        """
        try:
            with current_census().batcher(self, current_owner.get()):
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
    ) -> _R:
        """Run an item in a batch with others of the same key, and return its result.

        After this has ended the item is only touched if it was in a batch with items whose callers still wait.

        Args:
            item: what is handed to ``run``.
            key: items of different keys never share a batch.
            size: how much of a batch it takes.
            deadline: when, on trio's clock, the caller does not want it any more.
            start_within: for how many seconds it may wait for a batch that runs.

        Raises:
            Overloaded: too many items wait.
            QueueTimeout: no batch has run it in time, and none will.
            DeadlineExceeded: the deadline passed first.
            NotReady: the batcher was cancelled first.
            trio.ClosedResourceError: it has been closed.
            ModelFailure: ``run`` returned no result for each item.
            Exception: the item's outcome.

        Cancellation: while it waits, which takes the item away as if it had never come; while it runs, which drops its
        result, and if it was the last one of its batch, cancels ``run`` and waits until that has ended.
        """
        if self._closing:
            raise trio.ClosedResourceError
        call: BatchedCall[_T, _R] = BatchedCall(item, size, trio.current_time())
        self._policy.arrive(call, key, size, call.arrived)
        self._dispatch()
        with trio.move_on_at(deadline) as scope:
            try:
                if start_within < math.inf:
                    await self._begin_within(start_within, call)
                await call.done.wait()
            except trio.Cancelled:
                await self._leave(call)
                raise
        if scope.cancelled_caught:
            raise DeadlineExceeded("the deadline passed before the batch of the request had run")
        return call.outcome()

    def flush(self) -> None:
        """Let what waits now run without further delay, as far as ``concurrency`` allows."""
        self._dispatch(math.inf)

    async def aclose(self) -> None:
        """Take nothing in any more, run what waits without further delay, and return when the last batch has ended.

        Cancellation: while batches run, which go on in :meth:`serve`.
        """
        self._closing = True
        if self._nursery is None:
            self._give_up()
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
            self._give_up()
            raise

    def _dispatch(self, now: float | None = None) -> None:
        """Start every batch that may run now, and see to it that the next one is started in time."""
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

    def _give_up(self) -> None:
        """Start nothing any more, and tell those who wait."""
        self._closing = True
        for call in self._policy.clear():
            call.abandon()

    async def _begin_within(self, seconds: float, call: BatchedCall[_T, _R]) -> None:
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
                self._tell(run)
                with traced_batch(run.calls, run.size):
                    await self._attempt(run)
        except BaseException:  # the cancellation of everything, as nothing else gets out of an attempt
            self._give_up()
            raise
        finally:
            run.abandon()
            self._running -= 1
            self._dispatch()

    def _tell(self, run: BatchRun[_T, _R]) -> None:
        now = trio.current_time()
        self._hooks.batch_size(run.size)
        for call in run.calls:
            self._hooks.queue_time(now - call.arrived)

    async def _attempt(self, run: BatchRun[_T, _R]) -> None:
        results: Sequence[_R | Exception] = ()
        with run.scope:
            try:
                results = await self._run([call.item for call in run.calls])
            except Exception as error:  # noqa: BLE001 - the border to whoever runs batches; it is raised in the callers
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
        log.warning("batch failed, its requests run one by one", requests=len(run.calls), reason=text_of(error))
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
    message = f"a batch was answered with the wrong number of results: expected a list of {len(calls)}, found {found}"
    log.error("batch answered wrongly", requests=len(calls), found=found)
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
    """Open a batcher that has a nursery of its own; the arguments are those of :class:`Batcher`.

    Leaving the block runs what waits and ends when that has ended; an error of the block ends everything at once, and
    is in an exception group as one of a nursery's is.

    Cancellation: at any checkpoint; whoever still waits gets ``NotReady``.
    """
    batcher = Batcher(run, options, concurrency=concurrency, retry_singly=retry_singly, hooks=hooks)
    async with trio.open_nursery() as nursery:
        await nursery.start(batcher.serve)
        yield batcher
        await batcher.aclose()
