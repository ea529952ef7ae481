"""A worker that is a process, as the server sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.processes.codec import encode
from ovmstrio.runtimes.ops.executor.processes.life import NO_ANSWER, Life
from ovmstrio.runtimes.ops.executor.processes.messages import answer_of, encode_samples, unsendable
from ovmstrio.runtimes.ops.executor.processes.source import Source
from ovmstrio.runtimes.ops.executor.samples import ReportStage, Result, Sample

__all__ = ["GRACE_SECONDS", "ProcessWorker"]

GRACE_SECONDS: Final = 5.0
"""How long a batch whose requests have gone may go on before its process is killed."""

_PROGRAM: Final = "ovmstrio.runtimes.ops.executor.processes.child"

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
        source: Source,
        *,
        nursery: trio.Nursery,
        report_stage: ReportStage,
        died: Callable[[str], None],
    ) -> None:
        self.index = index
        self._op = op
        self._source = source
        self._nursery = nursery
        self._report_stage = report_stage
        self._died = died
        self._life: Life | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process, if there is one."""
        return None if self._life is None else self._life.pid

    @property
    def is_spoiled(self) -> bool:
        """Whether the process is gone, still works for requests that have gone, or has to recover from one."""
        return self._life is None or self._life.is_over or self._life.awaited is not None

    async def start(self) -> None:
        """Start a process, and wait until it is ready.

        Raises:
            ConfigError: the Op cannot be made in it, or it ended before.
            OSError: no process can be started.

        Ownership: the process belongs to the nursery's task.

        Cancellation: at once; the process is killed.
        """
        life = Life(_PROGRAM)
        await self._nursery.start(self._host, life)
        try:
            answer = await life.ask(encode(self._first_message()))
        except BaseException:
            life.kill()
            raise
        problem = f"its process {life.why}" if answer is None or life.is_over else answer.get("problem")
        if problem:
            life.kill()
            raise ConfigError([Problem(f"worker {self.index} of Op {self._op} cannot be started: {problem}")])
        self._life = life

    def _first_message(self) -> dict[str, Any]:
        source = self._source
        return {
            "loader": source.loader, "argument": source.argument, "op": self._op, "index": self.index,
            "path": [os.fspath(one) for one in sys.path],
        }  # fmt: skip

    async def _host(self, life: Life, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own one process until it has ended.

        Cancellation: at once; the process is killed.
        """
        await life.run(task_status)
        if life is self._life and not life.is_unwanted:
            log.error("worker process has ended", op=self._op, worker=self.index, pid=life.pid, why=life.why)
            self._died(life.why)

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Have the process work on samples, and give the result of each.

        Ownership: nothing once it has ended; large arrays are copied to memory that both have.

        Cancellation: at once; the worker is spoiled until the process is done.
        """
        life = self._life
        if life is None:
            return [Result(failure=failures.lost(self._op, "has ended"))] * len(samples)
        try:
            message = encode_samples(samples)
        except TypeError as error:
            return await self._singly(samples, error)
        received = await life.ask(message)
        if received is None:
            return [Result(failure=failures.lost(self._op, life.why))] * len(samples)
        try:
            answer = answer_of(received)
        except NO_ANSWER as error:
            life.condemn(error)
            return [Result(failure=failures.lost(self._op, life.why))] * len(samples)
        for stage, ids, span in answer.stages:
            self._report_stage(stage, ids, span)
        return answer.results

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
        life = self._life
        if life is not None and not life.is_over:
            with trio.move_on_after(GRACE_SECONDS):
                await life.settle()
        if life is None or life.is_over or life.awaited is not None:
            self._life = None
            if life is not None:
                life.kill()
            await self.start()

    async def aclose(self) -> None:
        """End the process, by force if it does not end by itself.

        Cancellation: shielded, for it is bounded.
        """
        if self._life is not None:
            await self._life.aclose(GRACE_SECONDS)
