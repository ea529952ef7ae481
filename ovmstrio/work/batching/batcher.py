"""Joins the items of many callers into batches, and gives each caller the result of its own item."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import structlog
import trio

from ovmstrio.core.census import current_census, current_owner
from ovmstrio.core.errors import DeadlineExceeded, ModelFailure, QueueTimeout
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.texts import text_of
from ovmstrio.work.batching.batch_calls import BatchedCall, BatchRun
from ovmstrio.work.batching.batch_spans import traced_batch
from ovmstrio.work.batching.policy import BatchOptions, BatchPolicy

__all__ = ["Batcher", "RunBatch", "open_batcher"]

_T = TypeVar("_T")
_R = TypeVar("_R")

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
