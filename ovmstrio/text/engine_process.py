"""The process that an engine lives in: started, started again when it has ended, put to sleep, and woken by a request.

::

    asleep ──(a request)──> loading ──> ready ──(nobody asks)──> asleep
                               ^          │
                               └─ pause ──┴── it ended: its requests fail at once, and new ones, until it is ready
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from ovmstrio.core.errors import ModelFailure, NotReady
from ovmstrio.inference.engine.messages import LOADED
from ovmstrio.isolation.channel import NO_MESSAGE
from ovmstrio.isolation.worker_process import KeptProcess, WorkerProcess
from ovmstrio.util.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.config.specs import TextModelSpec

__all__ = ["PROGRAM", "EngineProcess", "KnowsRequests", "sleep_when_idle"]

# ----------------------------------------------------------------------
# The process that an engine lives in: started, started again when it has ended, put to sleep, and woken by a request
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

PROGRAM: Final = "ovmstrio.inference.engine"
"""Of models that make text."""
_CALLS: Final = 1_000_000
"""Requests are counted by the engine, which knows how many it has room for."""

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_STABLE: Final = 60.0
_GRACE_SECONDS: Final = 1.0


class EngineProcess:
    """One model's process, or none while it sleeps.

    Args:
        options: what the program is told first.
        name: of the model, for logs and messages.
        heard: is called with each frame that the program sends by itself.
        lost: is called when a process has ended that was ready, with the reason.
        program: the module that the process runs.

    Attributes:
        facts: what the program has told of the model when it was loaded last; empty before that.
        obstacle: why there is no process that could be asked; empty if there is one, or one is to come for sure.
        restarts: how many processes have been started after others.
    """

    def __init__(
        self,
        options: Any,
        name: str,
        heard: Callable[[Any], None],
        lost: Callable[[str], None],
        program: str = PROGRAM,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.obstacle = ""
        self.restarts = 0
        self._options = options
        self._name = name
        self._heard = heard
        self._lost = lost
        self._program = program
        self._is_ready = False
        self._kept: KeptProcess | None = None
        self._is_closed = False
        self._wanted = trio.Event()
        self._stopping = trio.Event()
        self._changes = trio.lowlevel.ParkingLot()

    @property
    def is_asleep(self) -> bool:
        """Whether there is no process, and none is being started."""
        return self._kept is None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Have a process, and one again for each request that finds none; started once the first one is ready.

        Raises:
            ModelFailure: the model cannot be loaded, the first time.

        Ownership: the process.

        Cancellation: at once; the process is killed.
        """
        try:
            await self._keep(task_status)
            while True:
                self._wanted = trio.Event()
                await self._wanted.wait()
                log.info("the model is asked again and loaded", model=self._name)
                # That it cannot be loaded is told by the obstacle; the next one who asks has it tried again.
                with suppress(ModelFailure):
                    await self._keep()
        finally:
            self.obstacle = "the model is closed"
            self._is_closed = True
            self._changes.unpark_all()

    @property
    def pid(self) -> int | None:
        """The number of the process, if there is one."""
        return None if self._kept is None or self._kept.process is None else self._kept.process.pid

    @property
    def place(self) -> int | str:
        """Where it lives, for those who look."""
        return self.pid or "asleep"

    def watched(self, requests: KnowsRequests) -> KnowsRequests:
        """Give what knows of all requests, where this is what knows of those of this process."""
        return requests

    async def _keep(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Have a process until :meth:`sleep`, or another one after it; started once the first one is ready.

        Raises:
            ModelFailure: the model cannot be loaded, the first time; later that is tried again.

        Cancellation: at once; the process is killed.
        """
        self._stopping = trio.Event()
        self._kept = kept = KeptProcess(
            0,
            self._make,
            self._options,
            prepare=self._prepare,
            cannot_start=self._cannot_start,
            backoff=Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, _STABLE),
            stopping=self._stopping,
            changed=self._tell_change,
            ended=self._ended,
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kept.keep)
                while not self._is_ready and not self.obstacle:
                    await self._changes.park()
                if self.obstacle:
                    nursery.cancel_scope.cancel()
                else:
                    task_status.started()
        finally:
            self._kept = None
            self._is_ready = False
            self._changes.unpark_all()
        if self._stopping.is_set():
            # Who asks next has it started; that the last one has ended keeps nobody from that.
            self.obstacle = ""
        elif self.obstacle:
            raise ModelFailure(self.obstacle)

    def _tell_change(self) -> None:
        self._changes.unpark_all()

    def _make(self) -> WorkerProcess:
        return WorkerProcess(
            self._program, calls_at_once=_CALLS, ends_group=True, names={"model": self._name}, heard=self._heard
        )

    async def _prepare(self, process: WorkerProcess, answer: Any) -> bool:
        try:
            kind, told = answer
            if kind == LOADED:
                self.facts = dict(told)
        except NO_MESSAGE as wrong:
            process.condemn(wrong)
            return False
        if kind != LOADED:
            self.obstacle = f"the model cannot be loaded: {told}"
            self._changes.unpark_all()
            return False
        self.obstacle = ""
        self._is_ready = True
        return True

    def _cannot_start(self, error: OSError) -> None:
        self.obstacle = f"no process can be started for the model: {error.strerror or error}"
        self._changes.unpark_all()

    def _ended(self, kept: KeptProcess, process: WorkerProcess) -> None:
        del kept
        was_ready, self._is_ready = self._is_ready, False
        if self._stopping.is_set():
            return
        if was_ready or not self.obstacle:
            self.obstacle = f"the process of the model {process.why}; it is being started again"
        self.restarts += 1
        log.error("the process of a model has ended", model=self._name, pid=process.pid, why=process.why)
        self._lost(self.obstacle)

    async def ready(self) -> WorkerProcess:
        """Give the process, waiting for it if it has been asleep.

        Raises:
            NotReady: the last one has ended, or could not be started, and there is no other yet.

        Cancellation: at once.
        """
        if self._kept is None and not self._is_closed:
            self.obstacle = ""
        while True:
            if self._kept is None:
                self._wanted.set()
            process = None if self._kept is None else self._kept.process
            if self._is_ready and process is not None and not process.is_retired:
                return process
            if self.obstacle:
                raise NotReady(self.obstacle)
            await self._changes.park()

    async def woken(self) -> None:
        """Wait until there is a process that can be asked.

        Cancellation: at once.
        """
        while not self._is_ready:
            await self._changes.park()

    async def sleep(self) -> None:
        """End the process, which gives back all its memory; the next one who asks has it started again.

        Cancellation: shielded, for it is bounded.
        """
        self._stopping.set()
        kept = self._kept
        if kept is not None and kept.process is not None:
            await kept.process.close(_GRACE_SECONDS)
        self._changes.unpark_all()


# ----------------------------------------------------------------------
# Memory of models that nobody asks is given back: their process ends, and the next request starts another one
# ----------------------------------------------------------------------


class KnowsRequests(Protocol):
    """Knows the requests of a model.

    Attributes:
        last_asked: when somebody has asked last, or an answer has ended, on trio's clock.
    """

    last_asked: float

    @property
    def open(self) -> int:
        """How many requests there are."""
        ...

    async def idle(self) -> None:
        """Wait until there is no request.

        Cancellation: at once.
        """
        ...


class Sleeper(Protocol):
    """A process that can give its memory back."""

    async def woken(self) -> None:
        """Wait until there is a process that can be asked.

        Cancellation: at once.
        """
        ...

    async def sleep(self) -> None:
        """End the process; the next one who asks has it started again.

        Cancellation: bounded.
        """
        ...

    def watched(self, requests: KnowsRequests) -> KnowsRequests:
        """Give what knows of all requests, where the argument knows of those of this process of the server."""
        ...


async def sleep_when_idle(process: Sleeper, asked: KnowsRequests, spec: TextModelSpec) -> None:
    """Give back the memory of a model that nobody has asked for a while.

    Cancellation: at once.
    """
    asked = process.watched(asked)
    while True:
        await process.woken()
        asked.last_asked = trio.current_time()
        await _asked_no_more(asked, spec.idle_unload_seconds)
        log.info("the model is unloaded, for nobody asks it", model=spec.name, seconds=spec.idle_unload_seconds)
        await process.sleep()


async def _asked_no_more(asked: KnowsRequests, seconds: float) -> None:
    """Wait until nobody has asked for so long.

    Cancellation: at once.
    """
    while asked.open or trio.current_time() < asked.last_asked + seconds:
        await asked.idle()
        await trio.sleep_until(asked.last_asked + seconds)
