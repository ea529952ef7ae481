"""A worker that is a process, as the server sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tracing import current_span
from ovmstrio.isolation.channel import NO_MESSAGE
from ovmstrio.isolation.worker_process import WorkerEnded, WorkerProcess
from ovmstrio.ops.executor import failures
from ovmstrio.ops.executor.channel import ReportStage, Result, Sample
from ovmstrio.ops.executor.pipeline_source import RECOVER, PipelineSource, answer_of, batch_message, unsendable
from ovmstrio.ops.executor.stages import tell_stages
from ovmstrio.ops.observing.figures import names_of_code

__all__ = ["GRACE_SECONDS", "ProcessWorker"]

GRACE_SECONDS: Final = 5.0
"""How long a batch whose requests have gone may go on before its process is killed."""

_PROGRAM: Final = "ovmstrio.ops.executor.op_program"

log = structlog.get_logger(__name__)


class ProcessWorker:
    """One worker, in one process after the other.

    Args:
        op: the Op's name.
        index: the worker's number.
        source: where the process gets the Op from.
        nursery: hosts the tasks that own the processes.
        report_stage: is told of stages.
        died: is told why a process ended by itself.
    """

    def __init__(
        self,
        op: str,
        index: int,
        source: PipelineSource,
        *,
        nursery: trio.Nursery,
        report_stage: ReportStage,
        died: Callable[[str], None],
    ) -> None:
        self.index = index
        self._op = op
        self._names = names_of_code(op)
        self._source = source
        self._nursery = nursery
        self._report_stage = report_stage
        self._died = died
        self._process: WorkerProcess | None = None
        self._is_spoiled = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The number of the process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def is_spoiled(self) -> bool:
        """Whether the process is gone, still works for requests that have gone, or has to recover from one."""
        process = self._process
        return process is None or process.is_retired or process.is_busy or self._is_spoiled

    async def start(self) -> None:
        """Start a process, and wait until it is ready.

        Raises:
            ConfigError: the Op cannot be made in it, or it ended before.
            OSError: no process can be started.

        Ownership: the process belongs to the nursery's task.

        Cancellation: at once; the process is killed.
        """
        process = WorkerProcess(_PROGRAM, names=self._names)
        buried = partial(self._tell_end, process)
        try:
            problem = await process.start(self._nursery, self._first_request(), buried=buried)
        except WorkerEnded as end:
            problem = f"its process {end.why}"
        if problem:
            process.kill()
            raise ConfigError([Problem(f"worker {self.index} of Op {self._op} cannot be started: {problem}")])
        self._process, self._is_spoiled = process, False

    def _first_request(self) -> dict[str, Any]:
        source = self._source
        return {
            "loader": source.loader, "argument": source.argument, "op": self._op, "index": self.index,
            "path": [os.fspath(one) for one in sys.path],
        }  # fmt: skip

    async def _tell_end(self, process: WorkerProcess) -> None:
        if process is self._process and not self._is_closed:
            log.error("worker process has ended", op=self._op, worker=self.index, pid=process.pid, why=process.why)
            self._died(process.why)

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Have the process work on samples, and give the result of each.

        Ownership: nothing once it has ended; large arrays are copied to memory that both have.

        Cancellation: at once; the worker is spoiled until the process is done.
        """
        process, span = self._process, current_span.get()
        if process is None:
            return self._lost("has ended", samples)
        try:
            message = await process.call(batch_message(samples, {} if span is None else dict(span.headers())))
        except TypeError as error:
            return await self._singly(samples, error)
        except WorkerEnded as end:
            return self._lost(end.why, samples)
        try:
            answer = answer_of(message)
        except NO_MESSAGE as error:
            process.condemn(error)
            await process.ended.wait()
            return self._lost(process.why, samples)
        self._is_spoiled = answer.is_spoiled
        tell_stages(answer.stages, self._report_stage, span)
        return answer.results

    def _lost(self, why: str, samples: Sequence[Sample]) -> list[Result]:
        return [Result(failure=failures.lost(self._op, why))] * len(samples)

    async def _singly(self, samples: Sequence[Sample], error: TypeError) -> list[Result]:
        if len(samples) == 1:
            return [Result(failure=unsendable(error))]
        return [result for sample in samples for result in await self.run([sample])]

    async def recover(self) -> None:
        """Wait until the process is done with what nobody wants any more, or replace it.

        Raises:
            ConfigError: as :meth:`start`.
            OSError: as :meth:`start`.

        Cancellation: at once.
        """
        if self._process is None or not await self._has_recovered(self._process):
            self._process = None
            await self.start()

    async def _has_recovered(self, process: WorkerProcess) -> bool:
        with trio.move_on_after(GRACE_SECONDS), suppress(WorkerEnded):
            await process.call(RECOVER)
            self._is_spoiled = False
            return True
        process.kill()
        return False

    async def aclose(self) -> None:
        """End the process, by force if it does not end by itself.

        Cancellation: shielded, for it is bounded.
        """
        self._is_closed = True
        if self._process is not None:
            await self._process.close(GRACE_SECONDS)
