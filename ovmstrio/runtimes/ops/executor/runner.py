"""One Op that runs: its channel, its batches, its workers."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog
import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.channel import Channel, ReportStage, Result, Sample, StallDetector
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.executor.workers import WorkerPool
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
        stall_detector: knows whether anything in the pipeline moves.
        report_stage: is to be told how long outputs, which are there already, wait for room behind the Op.

    Attributes:
        channel: where samples wait.
        report_stage: as above.
    """

    def __init__(
        self,
        name: str,
        settings: OpSettings,
        capacity: int,
        pool: WorkerPool,
        *,
        stall_detector: StallDetector,
        report_stage: ReportStage,
    ) -> None:
        self.name = name
        self.report_stage = report_stage
        self._pool = pool
        self._stall_detector = stall_detector
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
            self._stall_detector.when_stalled(batcher.flush)
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

    async def _submit(self, batcher: Batcher[Sample, Result], sample: Sample) -> list[Result]:
        try:
            self._stall_detector.stop()
            try:
                return [await batcher.submit(sample)]
            finally:
                if sample in self._begun:
                    self._begun.remove(sample)
                else:
                    self._stall_detector.go()
        except (NotReady, trio.ClosedResourceError):
            return [Result(failure=failures.closed())]

    async def _run(self, samples: Sequence[Sample]) -> Sequence[Result | OpFailure]:
        """Run one batch, its oldest request first.

        Cancellation: as the worker's.
        """
        for sample in samples:
            self._begun.add(sample)
            self._stall_detector.go()
        ordered = sorted(samples, key=lambda sample: sample.data_id)
        results = dict(zip(ordered, await self._pool.run(ordered), strict=True))
        return [results[sample] for sample in samples]
