"""Workers of one Op, in this process and in separate processes, and the pool that assigns batches to them."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.service import notify_readiness_changed
from ovmstrio.core.tracing import child_span, current_span
from ovmstrio.isolation.messages import MALFORMED_MESSAGE_ERRORS
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess, call_headers
from ovmstrio.ops.executor import failures
from ovmstrio.ops.executor.channel import Result, Sample, StageCallback, Worker
from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.executor.op_instance import OpInstance, report_stages, run_batch, start_instance
from ovmstrio.ops.executor.pipeline_source import (
    RECOVER,
    PipelineSource,
    decode_reply,
    encode_batch,
    unsendable_failure,
)
from ovmstrio.ops.messages import CustomExceptionCode
from ovmstrio.ops.observing.hooks import OpHooks
from ovmstrio.ops.observing.log_files import log_fields_of
from ovmstrio.ops.op import Op
from ovmstrio.ops.predictor.protocol import CreatePredictor
from ovmstrio.ops.settings import OpSettings
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.truncation import text_of

# ----------------------------------------------------------------------
# Workers in this process, and the pool
# ----------------------------------------------------------------------

GRACE_SECONDS: Final = 5.0
"""Grace period of open requests at shutdown, and of cancelled hooks and batches."""

MAX_STUCK_INSTANCES: Final = 8
"""Maximum stuck Op instances per worker; at this limit the worker fails."""

RECOVERY_TIMEOUT_SECONDS: Final = 60.0
"""Time for a worker to recover before requests fail instead of waiting for it."""

_FIRST_DELAY_SECONDS: Final = 0.1
_MAX_DELAY_SECONDS: Final = 30.0

_get_failure: Final[Callable[[Result], OpFailure | None]] = attrgetter("failure")

log = structlog.get_logger(__name__)


class InstanceWorker:
    """Worker whose hooks run on this process's loop and threads, hosted by ``nursery``."""

    def __init__(
        self,
        op: Op,
        settings: OpSettings,
        index: int,
        make_predictor: CreatePredictor | None,
        *,
        report_stage: StageCallback,
        nursery: trio.Nursery,
    ) -> None:
        self.index = index
        self._op = op
        self._settings = settings
        self._make_predictor = make_predictor
        self._report_stage = report_stage
        self._nursery = nursery
        self._instance: OpInstance | None = None
        self._stuck: list[OpInstance] = []

    async def start(self) -> None:
        """Create the worker's copy of the Op; raises ConfigError.  The caller must close the worker."""
        make = self._make_predictor
        self._instance = await start_instance(self._op, self._settings, self.index, make, self._nursery)

    @property
    def needs_recovery(self) -> bool:
        """True if hooks of cancelled requests still run and block the next batch."""
        return self._instance is None or self._instance.needs_recovery

    def run(self, samples: Sequence[Sample]) -> Coroutine[Any, Any, list[Result]]:
        """Return the coroutine that processes samples; after cancellation the worker may need to recover."""
        if self._instance is None:
            raise AssertionError("worker has no copy of the Op")
        return run_batch(self._instance, samples, self._report_stage)

    async def recover(self) -> None:
        """Wait for running hooks, or abandon them with a new Op instance; raise ConfigError if too many are stuck."""
        if self._instance is not None:
            with trio.move_on_after(GRACE_SECONDS):
                await self._instance.idle()
                return
            log.warning("hook still running, worker gets a new copy of the Op", op=self._op.name, worker=self.index)
            self._stuck.append(self._instance)
            self._instance = None
        self._close_finished()
        await self.start()

    def _close_finished(self) -> None:
        for instance in [one for one in self._stuck if not one.is_busy]:
            self._stuck.remove(instance)
            instance.close()
        if len(self._stuck) >= MAX_STUCK_INSTANCES:
            message = f"{len(self._stuck)} hooks of Op {self._op.name} do not end"
            raise ConfigError([Problem(message, suggestion="check what the hooks wait for")])

    async def aclose(self) -> None:
        """Release the models; hooks on the loop end with the pipeline."""
        if self._stuck or (self._instance is not None and self._instance.is_busy):
            log.warning("cancelled hooks still running", op=self._op.name, worker=self.index)
        for instance in (*self._stuck, *([] if self._instance is None else [self._instance])):
            instance.close()


class WorkerPool:
    """Pool of the workers of one Op: assigns batches, and recovers workers after cancelled batches in ``nursery``."""

    def __init__(self, name: str, workers: Sequence[Worker], nursery: trio.Nursery, hooks: OpHooks) -> None:
        self._name = name
        self._hooks = hooks
        self._free_since = dict.fromkeys((worker.index for worker in workers), time.perf_counter())
        self._free = deque(workers)
        self._count = len(workers)
        self._failing: dict[int, str] = {}
        self._nursery = nursery
        self._lot = trio.lowlevel.ParkingLot()
        self._parked = 0

    @property
    def is_working(self) -> bool:
        """True if a worker runs or is about to."""
        return len(self._failing) < self._count

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Process samples on the next free worker and return their results."""
        try:
            worker = self._free.popleft() if self._free else await self._acquire()
        except OpFailure as failure:
            return [Result(failure=failure)] * len(samples)
        started_at = self._report_start(worker, samples)
        failed: bool | None = None
        try:
            with child_span(f"op {self._name}") as span:
                try:
                    results = await worker.run(samples)
                except OpFailure as error:
                    results = [Result(failure=error)] * len(samples)
                except Exception as error:  # last resort: every sample gets a result
                    log.exception("batch failed", op=self._name, data_ids=[sample.data_id for sample in samples])
                    results = [Result(failure=failures.unexpected_failure(self._name, error))] * len(samples)
                first = next(filter(None, map(_get_failure, results)), None)
                if span is not None and first is not None:
                    span.end(first)
            failed = first is not None
            return results
        finally:
            self._hooks.batch_ended(self._name, worker.index, started_at, failed=failed)
            if worker.needs_recovery:
                self._nursery.start_soon(self._recover, worker)
            else:
                self._release(worker)

    def _report_start(self, worker: Worker, samples: Sequence[Sample]) -> float:
        data_ids = [samples[0].data_id] if len(samples) == 1 else [sample.data_id for sample in samples]
        self._hooks.batch(self._name, worker.index, data_ids)
        waited = (self._free_since[worker.index], time.perf_counter())
        self._hooks.stage(self._name, worker.index, "in", data_ids, waited)
        return waited[1]

    def notice(self, worker: Worker) -> None:
        """Start the recovery of an exited worker if it is idle; a busy one recovers after its batch."""
        if worker in self._free:
            self._free.remove(worker)
            self._nursery.start_soon(self._recover, worker)

    async def _acquire(self) -> Worker:
        while not self._free:
            if not self.is_working:
                why = next(iter(self._failing.values()))
                text = f"no worker of Op {self._name} can be started: {why}"
                raise OpFailure(CustomExceptionCode.UNKNOW.value, text)
            self._parked += 1
            try:
                await self._lot.park()
            finally:
                self._parked -= 1
        return self._free.popleft()

    def _release(self, worker: Worker) -> None:
        if self._failing.pop(worker.index, None) is not None:
            notify_readiness_changed()
        self._free_since[worker.index] = time.perf_counter()
        self._free.append(worker)
        if self._parked:
            self._lot.unpark()

    async def _recover(self, worker: Worker) -> None:
        backoff = Backoff(_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS)
        while True:
            try:
                await self._recover_with_timeout(worker)
            except Exception as error:  # raised by a model or script; other Ops continue
                log.exception("worker restart failed", op=self._name, worker=worker.index)
                self._fail(worker, (text_of(error) or type(error).__name__).splitlines()[0])
                await trio.sleep(backoff.seconds_after())
            else:
                self._release(worker)
                return

    async def _recover_with_timeout(self, worker: Worker) -> None:
        watch = trio.CancelScope()
        self._nursery.start_soon(self._fail_after_timeout, worker, watch)
        try:
            await worker.recover()
        finally:
            watch.cancel()

    async def _fail_after_timeout(self, worker: Worker, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(RECOVERY_TIMEOUT_SECONDS)
            log.error("worker restart timed out", op=self._name, worker=worker.index)
            self._fail(worker, f"worker {worker.index} has not started within {RECOVERY_TIMEOUT_SECONDS:g} s")

    def _fail(self, worker: Worker, reason: str) -> None:
        self._failing[worker.index] = reason
        if not self.is_working:
            self._lot.unpark_all()
            notify_readiness_changed()


# ----------------------------------------------------------------------
# Workers in processes
# ----------------------------------------------------------------------

_PROGRAM: Final = "ovmstrio.ops.executor.op_program"


class ProcessWorker:
    """Worker of an Op in a process, which is replaced when it exits; ``on_exit`` receives the reason of an exit."""

    def __init__(
        self,
        op: str,
        index: int,
        source: PipelineSource,
        *,
        nursery: trio.Nursery,
        report_stage: StageCallback,
        on_exit: Callable[[str], None],
    ) -> None:
        self.index = index
        self._op = op
        self._log_fields = log_fields_of(op)
        self._source = source
        self._nursery = nursery
        self._report_stage = report_stage
        self._on_exit = on_exit
        self._process: WorkerProcess | None = None
        self._is_recovery_needed = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id, or None without a process."""
        return None if self._process is None else self._process.pid

    @property
    def needs_recovery(self) -> bool:
        """True if the process has exited, still runs a cancelled batch, or has to recover."""
        process = self._process
        return process is None or process.is_retired or process.is_busy or self._is_recovery_needed

    async def start(self) -> None:
        """Start a process and wait until it is ready; cancellation kills it.

        Raises ConfigError if the Op cannot be created or the process exits, OSError if the process cannot be started.
        """
        process = WorkerProcess(_PROGRAM, kills_group=True, log_fields=self._log_fields)
        buried = partial(self._process_exited, process)
        try:
            problem = await process.start(self._nursery, self._first_request(), on_exit=buried)
        except WorkerExited as end:
            problem = f"its process {end.why}"
        if problem:
            process.kill()
            raise ConfigError([Problem(f"worker {self.index} of Op {self._op} cannot be started: {problem}")])
        self._process, self._is_recovery_needed = process, False

    def _first_request(self) -> dict[str, Any]:
        source = self._source
        return {
            "loader": source.loader, "argument": source.argument, "op": self._op, "index": self.index,
            "path": [os.fspath(one) for one in sys.path],
        }  # fmt: skip

    async def _process_exited(self, process: WorkerProcess) -> None:
        if process is self._process and not self._is_closed:
            log.error("worker process exited", op=self._op, worker=self.index, pid=process.pid, reason=process.why)
            self._on_exit(process.why)

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        """Process samples in the worker process; after cancellation the worker must recover."""
        process, span = self._process, current_span.get()
        if process is None:
            return self._exit_results("has ended", samples)
        try:
            message = await process.call(encode_batch(samples, call_headers()))
        except TypeError as error:
            if len(samples) == 1:
                return [Result(failure=unsendable_failure(error))]
            return [result for sample in samples for result in await self.run([sample])]
        except WorkerExited as end:
            return self._exit_results(end.why, samples)
        try:
            answer = decode_reply(message)
        except MALFORMED_MESSAGE_ERRORS as error:
            process.kill_for_violation(error)
            await process.ended.wait()
            return self._exit_results(process.why, samples)
        self._is_recovery_needed = answer.needs_recovery
        report_stages(answer.stages, self._report_stage, span)
        return answer.results

    def _exit_results(self, reason: str, samples: Sequence[Sample]) -> list[Result]:
        return [Result(failure=failures.worker_exited_failure(self._op, reason))] * len(samples)

    async def recover(self) -> None:
        """Wait until the process finishes cancelled work, or replace it; raises as :meth:`start`."""
        if self._process is None or not await self._has_recovered(self._process):
            self._process = None
            await self.start()

    async def _has_recovered(self, process: WorkerProcess) -> bool:
        with trio.move_on_after(GRACE_SECONDS), suppress(WorkerExited):
            await process.call(RECOVER)
            self._is_recovery_needed = False
            return True
        process.kill()
        return False

    async def aclose(self) -> None:
        """Stop the process and kill it after the grace period; shielded."""
        self._is_closed = True
        if self._process is not None:
            await self._process.close(GRACE_SECONDS)
