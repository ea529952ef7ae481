"""Worker process of an Op, server side."""

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
from ovmstrio.isolation.packets import MALFORMED_MESSAGE_ERRORS
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess
from ovmstrio.ops.executor import failures
from ovmstrio.ops.executor.channel import Result, Sample, StageCallback
from ovmstrio.ops.executor.pipeline_source import (
    RECOVER,
    PipelineSource,
    decode_reply,
    encode_batch,
    unsendable_failure,
)
from ovmstrio.ops.executor.stages import report_stages
from ovmstrio.ops.observing.log_files import log_fields_of

GRACE_SECONDS: Final = 5.0
"""Time for a cancelled batch to end before its process is killed."""

_PROGRAM: Final = "ovmstrio.ops.executor.op_program"

log = structlog.get_logger(__name__)


class ProcessWorker:
    """Worker of an Op in a process, which is replaced when it exits; ``died`` receives the reason of an exit."""

    def __init__(
        self,
        op: str,
        index: int,
        source: PipelineSource,
        *,
        nursery: trio.Nursery,
        report_stage: StageCallback,
        died: Callable[[str], None],
    ) -> None:
        self.index = index
        self._op = op
        self._names = log_fields_of(op)
        self._source = source
        self._nursery = nursery
        self._report_stage = report_stage
        self._died = died
        self._process: WorkerProcess | None = None
        self._is_spoiled = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id, or None without a process."""
        return None if self._process is None else self._process.pid

    @property
    def needs_recovery(self) -> bool:
        """Whether the process has exited, still runs a cancelled batch, or has to recover."""
        process = self._process
        return process is None or process.is_retired or process.is_busy or self._is_spoiled

    async def start(self) -> None:
        """Start a process and wait until it is ready; cancellation kills it.

        Raises ConfigError if the Op cannot be created or the process exits, OSError if the process cannot be started.
        """
        process = WorkerProcess(_PROGRAM, names=self._names)
        buried = partial(self._process_exited, process)
        try:
            problem = await process.start(self._nursery, self._first_request(), buried=buried)
        except WorkerExited as end:
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

    async def _process_exited(self, process: WorkerProcess) -> None:
        if process is self._process and not self._is_closed:
            log.error("worker process exited", op=self._op, worker=self.index, pid=process.pid, why=process.why)
            self._died(process.why)

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Process samples in the worker process; after cancellation the worker must recover."""
        process, span = self._process, current_span.get()
        if process is None:
            return self._lost("has ended", samples)
        try:
            message = await process.call(encode_batch(samples, {} if span is None else dict(span.headers())))
        except TypeError as error:
            if len(samples) == 1:
                return [Result(failure=unsendable_failure(error))]
            return [result for sample in samples for result in await self.run([sample])]
        except WorkerExited as end:
            return self._lost(end.why, samples)
        try:
            answer = decode_reply(message)
        except MALFORMED_MESSAGE_ERRORS as error:
            process.kill_for_violation(error)
            await process.ended.wait()
            return self._lost(process.why, samples)
        self._is_spoiled = answer.needs_recovery
        report_stages(answer.stages, self._report_stage, span)
        return answer.results

    def _lost(self, why: str, samples: Sequence[Sample]) -> list[Result]:
        return [Result(failure=failures.worker_exited_failure(self._op, why))] * len(samples)

    async def recover(self) -> None:
        """Wait until the process finishes cancelled work, or replace it; raises as :meth:`start`."""
        if self._process is None or not await self._has_recovered(self._process):
            self._process = None
            await self.start()

    async def _has_recovered(self, process: WorkerProcess) -> bool:
        with trio.move_on_after(GRACE_SECONDS), suppress(WorkerExited):
            await process.call(RECOVER)
            self._is_spoiled = False
            return True
        process.kill()
        return False

    async def aclose(self) -> None:
        """Stop the process and kill it after the grace period; shielded."""
        self._is_closed = True
        if self._process is not None:
            await self._process.close(GRACE_SECONDS)
