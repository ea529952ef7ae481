"""Engine process: started, restarted after a crash, ended when idle, and started again by a request.

::

    asleep ──(a request)──> loading ──> ready ──(idle)──> asleep
                               ^          │
                               └─ backoff ┴── exited: open and new requests fail until it is ready again
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from ovmstrio.core.errors import ModelFailure, NotReady
from ovmstrio.inference.engine.messages import LOADED
from ovmstrio.isolation.messages import MALFORMED_MESSAGE_ERRORS
from ovmstrio.isolation.worker_process import RestartedProcess, WorkerProcess
from ovmstrio.util.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.config.specs import TextModelSpec

log = structlog.get_logger(__name__)

PROGRAM: Final = "ovmstrio.inference.engine"
"""Program of language models."""
_MAX_CALLS: Final = 1_000_000
"""No limit on calls: the engine has its own queue."""

_FIRST_BACKOFF_SECONDS: Final = 0.5
_MAX_BACKOFF_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 1.0


class EngineProcess:
    """The process of one model, or none while it is asleep.

    Args:
        options: first message to the program.
        name: model name for logs and errors.
        on_message: called with each message that the program sends unasked.
        on_exit: called with the reason when a process ends unexpectedly.
        program: module that the process runs.
        on_drained: called after the messages that have arrived together.

    Attributes:
        facts: facts of the model from the last load.
        unready_reason: why no process is available; empty if one is ready or asleep.
        restarts: number of restarts.
    """

    def __init__(
        self,
        options: Any,
        name: str,
        on_message: Callable[[Any], None],
        on_exit: Callable[[str], None],
        program: str = PROGRAM,
        *,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.unready_reason = ""
        self.restarts = 0
        self._options = options
        self._name = name
        self._on_message = on_message
        self._on_drained = on_drained
        self._on_exit = on_exit
        self._program = program
        self._is_ready = False
        self._kept: RestartedProcess | None = None
        self._is_closed = False
        self._wakeup = trio.Event()
        self._stopping = trio.Event()
        self._change_lot = trio.lowlevel.ParkingLot()

    @property
    def is_asleep(self) -> bool:
        """True if there is no process and none is starting."""
        return self._kept is None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the process, again for each request after :meth:`sleep`; started once the first one is ready.

        Raises:
            ModelFailure: the model cannot be loaded the first time.
        """
        try:
            await self._keep(task_status)
            while True:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
                log.info("idle model reloading", model=self._name)
                # A failure is reported by the obstacle; the next request retries.
                with suppress(ModelFailure):
                    await self._keep()
        finally:
            self.unready_reason = "the model is closed"
            self._is_closed = True
            self._change_lot.unpark_all()

    @property
    def pid(self) -> int | None:
        """Process id, or None."""
        return None if self._kept is None or self._kept.process is None else self._kept.process.pid

    @property
    def place(self) -> int | str:
        """Location, for introspection."""
        return self.pid or "asleep"

    def watched(self, requests: RequestActivity) -> RequestActivity:
        """Return a view of all requests, given those of this worker."""
        return requests

    async def _keep(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the process and its restarts until :meth:`sleep`; started once the first one is ready.

        Raises:
            ModelFailure: the model cannot be loaded the first time.
        """
        self._stopping = trio.Event()
        self._kept = kept = RestartedProcess(
            0,
            self._create_process,
            self._options,
            prepare=self._prepare,
            cannot_start=self._cannot_start,
            backoff=Backoff(_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, _STABLE_SECONDS),
            stopping=self._stopping,
            changed=self._notify_change,
            ended=self._process_ended,
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kept.keep)
                while not self._is_ready and not self.unready_reason:
                    await self._change_lot.park()
                if self.unready_reason:
                    nursery.cancel_scope.cancel()
                else:
                    task_status.started()
        finally:
            self._kept = None
            self._is_ready = False
            self._change_lot.unpark_all()
        if self._stopping.is_set():
            # The next request starts a new process, whatever ended the last one.
            self.unready_reason = ""
        elif self.unready_reason:
            raise ModelFailure(self.unready_reason)

    def _notify_change(self) -> None:
        self._change_lot.unpark_all()

    def _create_process(self) -> WorkerProcess:
        return WorkerProcess(
            self._program,
            max_concurrent_calls=_MAX_CALLS,
            kills_group=True,
            log_fields={"model": self._name},
            on_message=self._on_message,
            on_drained=self._on_drained,
        )

    async def _prepare(self, process: WorkerProcess, answer: Any) -> bool:
        try:
            kind, facts = answer
            if kind == LOADED:
                self.facts = dict(facts)
        except MALFORMED_MESSAGE_ERRORS as wrong:
            process.kill_for_violation(wrong)
            return False
        if kind != LOADED:
            self.unready_reason = f"the model cannot be loaded: {facts}"
            self._change_lot.unpark_all()
            return False
        self.unready_reason = ""
        self._is_ready = True
        return True

    def _cannot_start(self, error: OSError) -> None:
        self.unready_reason = f"the engine process cannot be started: {error.strerror or error}"
        self._change_lot.unpark_all()

    def _process_ended(self, kept: RestartedProcess, process: WorkerProcess) -> None:
        del kept
        was_ready, self._is_ready = self._is_ready, False
        if self._stopping.is_set():
            return
        if was_ready or not self.unready_reason:
            self.unready_reason = f"the engine process {process.why}; it is restarting"
        self.restarts += 1
        log.error("engine process exited", model=self._name, pid=process.pid, why=process.why)
        self._on_exit(self.unready_reason)

    async def ready(self) -> WorkerProcess:
        """Return the process, waiting for one that was asleep.

        Raises:
            NotReady: the process has ended or could not start, and the next one is not ready.
        """
        if self._kept is None and not self._is_closed:
            self.unready_reason = ""
        while True:
            if self._kept is None:
                self._wakeup.set()
            process = None if self._kept is None else self._kept.process
            if self._is_ready and process is not None and not process.is_retired:
                return process
            if self.unready_reason:
                raise NotReady(self.unready_reason)
            await self._change_lot.park()

    async def woken(self) -> None:
        """Wait until the process is ready."""
        while not self._is_ready:
            await self._change_lot.park()

    async def sleep(self) -> None:
        """End the process, which frees its memory; the next request starts a new one.  Shielded and bounded."""
        self._stopping.set()
        kept = self._kept
        if kept is not None and kept.process is not None:
            await kept.process.close(_GRACE_SECONDS)
        self._change_lot.unpark_all()


class RequestActivity(Protocol):
    """View of the requests of a model.

    Attributes:
        last_asked: trio time of the last start or end of a request.
    """

    last_asked: float

    @property
    def open(self) -> int:
        """Number of open requests."""
        ...

    async def idle(self) -> None:
        """Wait until there is no request."""
        ...


async def sleep_when_idle(process: EngineProcess, asked: RequestActivity, spec: TextModelSpec) -> None:
    """End the process of a model after ``spec.idle_unload_seconds`` without requests."""
    requests = process.watched(asked)
    while True:
        await process.woken()
        requests.last_asked = trio.current_time()
        await _wait_idle(requests, spec.idle_unload_seconds)
        log.info("idle model unloaded", model=spec.name, seconds=spec.idle_unload_seconds)
        await process.sleep()


async def _wait_idle(requests: RequestActivity, seconds: float) -> None:
    while requests.open or trio.current_time() < requests.last_asked + seconds:
        await requests.idle()
        await trio.sleep_until(requests.last_asked + seconds)
