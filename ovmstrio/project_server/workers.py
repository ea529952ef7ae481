"""The parent of many processes that serve one project.

It accepts every connection itself and gives it to the process with the fewest: so no process queues what another one
could serve at once.  A process that dies is started again, after a pause that grows while it keeps dying.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.project_server.front_ends import make_tls
from ovmstrio.project_server.listening import open_project_listeners, port_of
from ovmstrio.project_server.readiness import ReadinessFile
from ovmstrio.project_server.worker import WorkerTask
from ovmstrio.runtimes.handlers.concurrency import Board
from ovmstrio.wire.listeners import address_of
from ovmstrio.work.backoff import Backoff
from ovmstrio.work.processes import KeptProcess
from ovmstrio.work.user_code.exits import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.project_server.settings import ProjectSettings
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
    from ovmstrio.work.processes import WorkerProcess

__all__ = ["Workers"]

log = structlog.get_logger(__name__)

_PROGRAM: Final = "ovmstrio.project_server.worker"
_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0
"""A process that has lived so long is started again without a long pause."""
_GENTLE: Final = frozenset({0, -signal.SIGINT, -signal.SIGTERM})
"""How processes end that are told to."""
_END_SECONDS: Final = 15.0
"""What a process gets to end, besides the grace of its requests."""


class Workers:
    """A project that many processes serve.

    Args:
        project: what is served.
        settings: of the server.
    """

    def __init__(self, project: ProjectSpec, settings: ProjectSettings) -> None:
        self._project = project
        self._settings = settings
        self._readiness = ReadinessFile(settings.readiness_file)
        self._board = Board.create(project.processes)
        self._changed = trio.Event()
        self._accepting = trio.CancelScope()
        self._draining = trio.Event()
        self._kept = [self._place(row) for row in range(project.processes)]
        self._has_been_ready = False
        self.drained = False

    async def run(self, report: Callable[[list[str]], None]) -> None:
        """Serve until drained.

        Raises:
            ConfigError: a process ended before all were ready for the first time, as its own log says; or TLS cannot
                be set up.
            OSError: an address cannot be bound.

        Ownership: the processes and the listeners.
        Cancellation: kills the processes.
        """
        # The processes do it; what is wrong is told once here.
        make_tls(self._project, self._settings)
        try:
            async with (
                open_project_listeners(self._project, self._settings) as listeners,
                trio.open_nursery() as nursery,
            ):
                for kept in self._kept:
                    nursery.start_soon(kept.keep)
                await self._until_ready()
                if not self._draining.is_set():
                    report([address_of(listener) for listener in listeners])
                with self._accepting:
                    await trio.serve_listeners(self._give, listeners, handler_nursery=nursery)
        finally:
            self._readiness.remove()
            self._board.close()

    async def drain(self) -> bool:
        """End gently: processes get the grace for their requests, and some time to end; False if they did not."""
        self.drained = True
        self._draining.set()
        self._readiness.remove()
        self._board.set_draining()
        await trio.sleep(self._settings.drain_delay)
        self._accepting.cancel()
        self._tell_change()
        with trio.move_on_after(self._settings.drain_seconds + _END_SECONDS):
            for kept in self._kept:
                kept.dismiss()
            while any(kept.process for kept in self._kept):
                await self._changed.wait()
            log.info("drained")
            return True
        return False

    # Connections

    async def _give(self, stream: trio.SocketStream) -> None:
        """Give a connection to the process that has the fewest; wait for one while there is none, and is to be one."""
        try:
            while True:
                kept = self._least_busy()
                if kept is None:
                    if self._draining.is_set():
                        return
                    await self._changed.wait()
                elif await kept.give(stream.socket.fileno()):
                    return
        finally:
            await trio.aclose_forcefully(stream)

    def _least_busy(self) -> KeptProcess | None:
        ready = [kept for kept in self._kept if kept.is_ready]
        return min(ready, key=self._connections, default=None)

    def _connections(self, kept: KeptProcess) -> tuple[int, int]:
        return kept.given - self._board.closed_connections(kept.row), kept.given

    # Processes

    def _place(self, row: int) -> KeptProcess:
        port = port_of(self._project, self._settings)
        task = WorkerTask(
            file=self._project.file, settings=self._settings, port=port, rows=self._board.rows, row=row
        )  # fmt: skip
        return KeptProcess(
            row,
            _PROGRAM,
            task.model_dump(mode="json"),
            self._board.descriptor,
            backoff=Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STABLE_SECONDS),
            stopping=self._draining,
            changed=self._tell_change,
            ended=self._notice_end,
        )

    def _notice_end(self, kept: KeptProcess, process: WorkerProcess) -> None:
        """Tell of a process that has ended by itself, and clear what it had taken.

        Raises:
            ConfigError: not all have been ready yet.
        """
        code = process.status or 0
        is_draining = self._draining.is_set()
        if not is_draining or (kept.is_ready and code not in _GENTLE):
            self._log_end(kept.row, process.pid, code)
        self._board.clear(kept.row)
        if not (is_draining or self._has_been_ready):
            text = f"a worker process ended before it was ready, by {_cause(code)}; its log says why"
            raise ConfigError([Problem(text, file=str(self._project.file))])

    def _log_end(self, row: int, pid: int | None, code: int) -> None:
        log.error(
            "a worker process has ended",
            project=self._project.name,
            pid=pid,
            cause=_cause(code),
            signal=signal_name(-code) if code < 0 else None,
            exit_code=code if code >= 0 else None,
            requests_lost=self._board.in_flight(row),
        )

    # Readiness

    async def _until_ready(self) -> None:
        while not (self._has_been_ready or self._draining.is_set()):
            await self._changed.wait()

    def _tell_change(self) -> None:
        """Wake whoever waits for processes, and let readiness be the truth."""
        if not self._draining.is_set() and all(kept.is_ready for kept in self._kept):
            self._has_been_ready = True
            self._readiness.create()
        else:
            self._readiness.remove()
        self._changed.set()
        self._changed = trio.Event()


def _cause(code: int) -> str:
    return signal_name(-code) if code < 0 else f"exit code {code}"
