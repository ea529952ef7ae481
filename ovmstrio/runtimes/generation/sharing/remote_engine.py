"""An engine that another process of the server has, as one has it that asks that process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import ModelFailure, NotReady, ServerError
from ovmstrio.runtimes.generation.sharing.shown_engine import ENDED, FRAMES, LEAVING, LOST, READY
from ovmstrio.work.processes import WorkerEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.engine_sharing import EngineSharing
    from ovmstrio.runtimes.generation.idle_unload import KnowsRequests

__all__ = ["RemoteEngine"]

_WAIT_SECONDS: Final = 60.0
"""How long a request waits for a process that is being started in the place of the one that had the engine."""
_STARTED: Final = "the worker that has the model's engine is being started"


class RemoteEngine:
    """One model's process, which is another one's of the server; see :class:`EngineProcess` for what is as there.

    Args:
        engines: the other processes.
        owner: the one that has it.
        key: by which it is asked for.
        heard: is called with each frame that is for this process.
        lost: is called when the engine has ended, with the reason.

    Attributes:
        facts: what the program has told of the model.
        obstacle: why it cannot be asked now; empty if it can.
    """

    def __init__(
        self,
        engines: EngineSharing,
        owner: int,
        key: str,
        heard: Callable[[Any], None],
        lost: Callable[[str], None],
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.obstacle = _STARTED
        self.pid: int | None = None
        self._engines = engines
        self._owner = owner
        self._key = key
        self._heard = heard
        self._lost = lost
        self._changes = trio.lowlevel.ParkingLot()
        self._started: trio.TaskStatus[None] | None = None
        self._times = 0

    @property
    def place(self) -> str:
        """Where it lives, for those who look."""
        return f"worker {self._owner}'s"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hear what the engine tells, and what the next one tells; started once it has been loaded.

        Raises:
            ModelFailure: it cannot be loaded, the first time.

        Cancellation: at once; what was asked of it ends.
        """
        self._started = task_status
        while True:
            # Who has been told that there is no more has also been told of what was lost with that.
            why = ""
            try:
                await self._engines.listen(self._owner, self._key, self._hear)
            except NotReady as error:
                why = error.message
            except ServerError as error:
                self._check_started(error)
                why = error.message
            self._detach(why)
            await self._engines.wait_change()

    def _check_started(self, error: ServerError) -> None:
        """See that an engine which cannot be loaded has been loaded before.

        Raises:
            ModelFailure: it has not.
        """
        if self._started is not None:
            raise ModelFailure(error.message) from error

    def _detach(self, why: str) -> None:
        if not self.obstacle:
            self.obstacle = _STARTED
            if why:
                self._lost(why)

    def _hear(self, part: Any) -> None:
        """Take what has come.

        Raises:
            ValueError, LookupError, TypeError: it is nothing that is told.
        """
        kind, told = part
        if kind == FRAMES:
            for frame in told:
                self._heard(frame)
        elif kind == LOST:
            self._lost(told)
        elif kind == READY:
            self.facts, self.obstacle = told, ""
            self._times += 1
            started, self._started = self._started, None
            if started is not None:
                started.started()
            self._changes.unpark_all()
        else:
            raise ValueError(f"{kind!r:.40} is nothing that engines tell")

    async def ready(self) -> RemoteEngine:
        """Give who is asked, waiting for a while for the next one where the last has ended.

        Raises:
            NotReady: there is none yet.

        Cancellation: at once.
        """
        with trio.move_on_after(_WAIT_SECONDS):
            while self.obstacle:
                await self._changes.park()
        if self.obstacle:
            raise NotReady(self.obstacle)
        return self

    async def woken(self) -> None:
        """Wait until it can be asked.

        Cancellation: at once.
        """
        while self.obstacle:
            await self._changes.park()

    async def sleep(self) -> None:
        """Leave it to its owner; what was asked of it ends with :meth:`run`."""

    def watched(self, requests: KnowsRequests) -> KnowsRequests:
        """Give what knows of the requests of this process."""
        return requests

    async def call(self, value: Any) -> Any:
        """Ask the engine, as a process is asked.

        Raises:
            WorkerEnded: its process has ended before it answered.
            NotReady: the worker that has it cannot be reached.

        Cancellation: at once.
        """
        while True:
            times = self._times
            outcome, told = await self._engines.call(self._owner, self._key, value)
            if outcome == ENDED:
                raise WorkerEnded(told, was_called=True)
            if outcome != LEAVING:
                return told
            with trio.move_on_after(_WAIT_SECONDS) as waiting:
                while times == self._times:
                    await self._changes.park()
            if waiting.cancelled_caught:
                raise NotReady(_STARTED)

    async def tell(self, value: Any) -> None:
        """Tell the engine something; one that is gone need not hear it.

        Raises:
            WorkerEnded: its process has ended.

        Cancellation: at once.
        """
        try:
            await self.call(value)
        except ServerError as error:
            raise WorkerEnded(error.message, was_called=False) from error
