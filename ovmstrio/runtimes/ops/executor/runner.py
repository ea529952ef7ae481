"""One Op that runs: its channel, its batches, its workers."""

from __future__ import annotations

import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog
import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.channel import Channel
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.executor.samples import Result, Sample, StageTold
from ovmstrio.runtimes.ops.executor.traffic import Traffic
from ovmstrio.runtimes.ops.executor.workers import WorkerPool
from ovmstrio.runtimes.ops.settings import OpSettings
from ovmstrio.work.batching import Batcher, BatchOptions

__all__ = ["OpRunner"]

log = structlog.get_logger(__name__)


class OpRunner:
    """Takes the samples of one Op from its channel to its workers.

    Args:
        name: the Op's name.
        settings: what holds for it.
        capacity: how many samples its channel holds; 0 for any number.
        pool: its workers.
        traffic: knows whether anything in the pipeline moves.
        told: is told how long outputs wait for room behind the Op.

    Attributes:
        channel: where samples wait.
    """

    def __init__(
        self, name: str, settings: OpSettings, capacity: int, pool: WorkerPool, *, traffic: Traffic, told: StageTold
    ) -> None:
        self.name = name
        self._told = told
        self._pool = pool
        self._traffic = traffic
        self._begun: set[Sample] = set()
        self._batcher: Batcher[Sample, Result] | None = None
        seats = settings.concurrency
        if settings.batch_size > 1:
            # One batch more than there are workers is collected while they work.
            seats = (settings.concurrency + 1) * settings.batch_size
            self._batcher = self._make_batcher(settings, seats)
        self.channel = Channel(capacity, seats)

    @property
    def is_working(self) -> bool:
        """Whether there is a worker that works, or is going to before long."""
        return self._pool.is_working

    def _make_batcher(self, settings: OpSettings, seats: int) -> Batcher[Sample, Result]:
        timeout = settings.batch_timeout_seconds
        if timeout is None:
            log.warning(
                "batches wait until they are full, or until no request moves any more: set auto_batching_timeout",
                op=self.name, batch_size=settings.batch_size,
            )  # fmt: skip
            timeout = math.inf
        options = BatchOptions(settings.batch_size, timeout, max_waiting=seats)
        batcher: Batcher[Sample, Result] = Batcher(self._run, options, concurrency=settings.concurrency)
        if timeout == math.inf:
            self._traffic.when_stalled(batcher.flush)
        return batcher

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the Op's batches until cancelled.

        Cancellation: at once; samples in batches end with 3001.
        """
        if self._batcher is None:
            task_status.started()
        else:
            await self._batcher.serve(task_status=task_status)

    def run(self, sample: Sample) -> Coroutine[Any, Any, list[Result]]:
        """Give what comes of a sample that has a seat.

        Ownership: the sample until it returns.

        Cancellation: at once; what a worker still does is waited for elsewhere.
        """
        return self._pool.run([sample]) if self._batcher is None else self._submit(self._batcher, sample)

    def handed_on(self, data_id: int, begin: float) -> None:
        """Note that a sample's output, which was there at ``begin``, is in the next channels."""
        self._told("out", [data_id], (begin, time.perf_counter()))

    async def _submit(self, batcher: Batcher[Sample, Result], sample: Sample) -> list[Result]:
        try:
            self._traffic.stop()
            try:
                return [await batcher.submit(sample)]
            finally:
                if sample in self._begun:
                    self._begun.remove(sample)
                else:
                    self._traffic.go()
        except (NotReady, trio.ClosedResourceError):
            return [Result(failure=failures.closed())]

    async def _run(self, samples: Sequence[Sample]) -> Sequence[Result | OpFailure]:
        """Run one batch, its oldest request first.

        Cancellation: as the worker's.
        """
        for sample in samples:
            self._begun.add(sample)
            self._traffic.go()
        ordered = sorted(samples, key=lambda sample: sample.data_id)
        results = dict(zip(ordered, await self._pool.run(ordered), strict=True))
        return [results[sample] for sample in samples]
