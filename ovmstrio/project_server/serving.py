"""The life of a project's server, from start to drain."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.project_server.front_ends import make_tls, open_front_end
from ovmstrio.project_server.listening import open_project_listeners
from ovmstrio.project_server.readiness import ReadinessFile
from ovmstrio.project_server.workers import Workers
from ovmstrio.runtimes.handlers.concurrency import LocalLimit
from ovmstrio.server.signals import obey_signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.project_server.front_ends import FrontEnd
    from ovmstrio.project_server.settings import ProjectSettings
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec

__all__ = ["ProjectRunning", "serve_project"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProjectRunning:
    """A project that can be called, as it is reported to whoever started it; ``seconds`` is what that took."""

    addresses: list[str]
    seconds: float


async def serve_project(
    project: ProjectSpec,
    settings: ProjectSettings,
    *,
    handle_signals: bool = True,
    task_status: trio.TaskStatus[ProjectRunning] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Serve a project until a signal or its caller ends it; True if it ended gently.

    Reports a :class:`ProjectRunning` once the project can be called: its models are there, its handler is built, and
    connections are accepted.

    Args:
        project: what to serve; with one process its environment and folder must be this process's.
        settings: of the server.
        handle_signals: whether SIGINT and SIGTERM drain, and stop at once the second time.
        task_status: gets the report.

    Raises:
        ConfigError: the handler cannot be loaded, or TLS cannot be set up.
        OSError: an address cannot be bound.
        ExceptionGroup: of these.

    Ownership: everything that the server opens, worker processes included, has ended when this returns.

    Cancellation: ends everything at once, without drain.
    """
    server = _OneProcess(project, settings) if project.processes == 1 else Workers(project, settings)
    started = perf_counter()
    async with trio.open_nursery() as nursery:

        async def drain() -> None:
            if not await server.drain():
                nursery.cancel_scope.cancel()

        if handle_signals:
            await nursery.start(obey_signals, drain, nursery.cancel_scope)

        def report(addresses: list[str]) -> None:
            running = ProjectRunning(addresses, perf_counter() - started)
            log.info("serving", project=project.name, addresses=addresses, seconds=round(running.seconds, 3))
            task_status.started(running)

        await server.run(report)
        nursery.cancel_scope.cancel()
    return server.drained


class _OneProcess:
    """A project that this process serves."""

    def __init__(self, project: ProjectSpec, settings: ProjectSettings) -> None:
        self._project = project
        self._settings = settings
        self._readiness = ReadinessFile(settings.readiness_file)
        self._front_end: FrontEnd | None = None
        self.drained = False

    async def run(self, report: Callable[[list[str]], None]) -> None:
        """Serve until drained."""
        tls = make_tls(self._project, self._settings)
        limit = LocalLimit(self._project.max_concurrency)
        try:
            async with (
                open_front_end(self._project, self._settings, limit, self.is_ready) as self._front_end,
                open_project_listeners(self._project, self._settings, tls) as listeners,
                trio.open_nursery() as nursery,
            ):
                bound = await nursery.start(self._front_end.serve_listeners, listeners)
                self._readiness.create()
                report(bound)
        finally:
            self._readiness.remove()

    def is_ready(self) -> bool:
        """Tell whether the project can be called."""
        return self._readiness.is_ready

    async def drain(self) -> bool:
        """End gently; False if nothing has begun that could."""
        self.drained = True
        self._readiness.remove()
        if self._front_end is None:
            return False
        await trio.sleep(self._settings.drain_delay)
        await self._front_end.drain(self._settings.drain_seconds)
        log.info("drained")
        return True
