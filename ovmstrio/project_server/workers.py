"""The parent of many processes that serve one project.

It accepts every connection itself and gives it to the process with the fewest: so no process queues what another one
could serve at once.  A process that dies is started again, after a pause that grows while it keeps dying.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.project_server.front_ends import make_tls
from ovmstrio.project_server.listening import open_project_listeners, port_of
from ovmstrio.project_server.passing import DRAIN, pass_connection
from ovmstrio.project_server.readiness import ReadinessFile
from ovmstrio.project_server.worker import WorkerTask
from ovmstrio.runtimes.handlers.concurrency import Board
from ovmstrio.wire.listeners import address_of
from ovmstrio.work.user_code.exits import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.project_server.settings import ProjectSettings
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec

__all__ = ["Workers"]

log = structlog.get_logger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0
"""A process that has lived so long is started again without a long pause."""
_GENTLE: Final = frozenset({0, -signal.SIGINT, -signal.SIGTERM})
"""How processes end that are told to."""
_END_SECONDS: Final = 15.0
"""What a process gets to end, besides the grace of its requests."""


@dataclass(eq=False)
class _Worker:
    """A process that lives; ``given`` counts the connections that it got."""

    row: int
    process: trio.Process
    control: trio.socket.SocketType
    is_ready: bool = False
    given: int = 0
    ended: trio.Event = field(default_factory=trio.Event)


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
        self._alive: dict[int, _Worker] = {}
        self._changed = trio.Event()
        self._accepting = trio.CancelScope()
        self._draining = trio.Event()
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
                for row in range(self._project.processes):
                    nursery.start_soon(self._keep, row)
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
            for worker in list(self._alive.values()):
                await _dismiss(worker)
            for worker in list(self._alive.values()):
                await worker.ended.wait()
            log.info("drained")
            return True
        return False

    # Connections

    async def _give(self, stream: trio.SocketStream) -> None:
        """Give a connection to the process that has the fewest; wait for one while there is none, and is to be one."""
        try:
            while True:
                worker = self._least_busy()
                if worker is None:
                    if self._draining.is_set():
                        return
                    await self._changed.wait()
                    continue
                worker.given += 1
                with suppress(OSError):
                    await pass_connection(worker.control, stream.socket.fileno())
                    return
                worker.is_ready = False
        finally:
            await trio.aclose_forcefully(stream)

    def _least_busy(self) -> _Worker | None:
        ready = [worker for worker in self._alive.values() if worker.is_ready]
        return min(ready, key=self._connections, default=None)

    def _connections(self, worker: _Worker) -> tuple[int, int]:
        return worker.given - self._board.closed_connections(worker.row), worker.given

    # Processes

    async def _keep(self, row: int) -> None:
        """Run a process, and another one after it, until the server drains."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._draining.is_set():
            started = trio.current_time()
            code = await self._run_one(row)
            if self._draining.is_set():
                return
            if not self._has_been_ready:
                text = f"a worker process ended before it was ready, by {_cause(code)}; its log says why"
                raise ConfigError([Problem(text, file=str(self._project.file))])
            if trio.current_time() - started > _STABLE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            log.warning("starting another worker process", row=row, seconds=pause)
            with trio.move_on_after(pause):
                await self._draining.wait()
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _run_one(self, row: int) -> int:
        """Run a process to its end, and give its exit code."""
        worker = await self._start(row)
        self._alive[row] = worker
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen_to, worker)
                code = await worker.process.wait()
                nursery.cancel_scope.cancel()
            if not self._draining.is_set() or (worker.is_ready and code not in _GENTLE):
                self._log_end(worker, code)
        finally:
            with trio.CancelScope(shield=True):
                await self._bury(worker)
        self._board.clear(row)
        return code

    async def _start(self, row: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            task = WorkerTask(
                file=self._project.file,
                settings=self._settings,
                port=port_of(self._project, self._settings),
                control=theirs.fileno(),
                board=self._board.descriptor,
                rows=self._board.rows,
                row=row,
            )
            # Without -P, modules of the current directory would come before the server's.
            command = [sys.executable, "-P", "-m", "ovmstrio.project_server.worker", task.model_dump_json()]
            descriptors = (task.control, task.board)
            # In a group of their own, so that a terminal's Ctrl-C is for the parent, which lets them finish.
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.DEVNULL, pass_fds=descriptors, process_group=0
            )
        return _Worker(row, process, trio.socket.from_stdlib_socket(ours))

    async def _listen_to(self, worker: _Worker) -> None:
        with suppress(OSError):
            if await worker.control.recv(1):
                worker.is_ready = True
                self._tell_change()

    async def _bury(self, worker: _Worker) -> None:
        self._alive.pop(worker.row, None)
        worker.is_ready = False
        self._tell_change()
        if worker.process.returncode is None:
            worker.process.kill()
            await worker.process.wait()
        worker.control.close()
        worker.ended.set()

    def _log_end(self, worker: _Worker, code: int) -> None:
        log.error(
            "a worker process has ended",
            project=self._project.name,
            pid=worker.process.pid,
            cause=_cause(code),
            signal=signal_name(-code) if code < 0 else None,
            exit_code=code if code >= 0 else None,
            requests_lost=self._board.in_flight(worker.row),
        )

    # Readiness

    async def _until_ready(self) -> None:
        while not (self._has_been_ready or self._draining.is_set()):
            await self._changed.wait()

    def _tell_change(self) -> None:
        """Wake whoever waits for processes, and let readiness be the truth."""
        alive = self._alive.values()
        if (
            not self._draining.is_set()
            and len(alive) == self._project.processes
            and all(each.is_ready for each in alive)
        ):
            self._has_been_ready = True
            self._readiness.create()
        else:
            self._readiness.remove()
        self._changed.set()
        self._changed = trio.Event()


async def _dismiss(worker: _Worker) -> None:
    """Let a process finish its requests; one that is not ready has none, and its constructor may take long."""
    if not worker.is_ready:
        worker.process.kill()
        return
    with suppress(OSError):
        await worker.control.send(DRAIN)


def _cause(code: int) -> str:
    return signal_name(-code) if code < 0 else f"exit code {code}"
