"""Trial load of a handler in a separate process, which protects the caller from user code.

The trial uses the loading code of the server, including constructor and models, and closes the handler afterwards.
"""

from __future__ import annotations

from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.service import GrpcDeclaration
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess, describe_probe_exit

TRIAL_SECONDS: Final = 120.0
"""Timeout of a trial."""

_PROGRAM: Final = "ovmstrio.handlers.trial_program"


class TrialHandler:
    """Placeholder for a handler that loaded in a trial; ``declaration`` names its gRPC services."""

    def __init__(self, name: str, declaration: GrpcDeclaration | None) -> None:
        self.metadata = ServableMetadata(name, "handler", (), ())
        self.declaration = declaration

    async def aclose(self) -> None:
        """Do nothing."""


async def trial_load_mounted(project: ProjectSpec, name: str) -> TrialHandler:
    """Try a project of ``handler_config_list``; raise ConfigError if the handler fails to load."""
    problems, services = await _try(project, name, TRIAL_SECONDS)
    if problems:
        raise ConfigError(problems)
    declaration = GrpcDeclaration(services, str(project.protobuf_path), {}) if services else None
    return TrialHandler(name, declaration)


async def trial_load(project: ProjectSpec, *, seconds: float = TRIAL_SECONDS) -> tuple[Problem, ...]:
    """Load and close the handler of a project in a separate process; return all problems.

    The handler's output goes to standard error. The process is killed after ``seconds``.
    """
    return (await _try(project, "", seconds))[0]


async def _try(project: ProjectSpec, mounted_as: str, seconds: float) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Return the problems of a handler and the names of its gRPC services.

    A handler that is the only service gets its folder as working directory, and its environment.
    """
    report: dict[str, Any] | None = None
    outcome = f"did not finish within {seconds:g} seconds"
    worker = WorkerProcess(_PROGRAM, kills_group=True)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(seconds):
            try:
                report = await worker.start(nursery, {"file": str(project.file), "mounted_as": mounted_as})
            except WorkerExited:
                await worker.ended.wait()
                outcome = describe_probe_exit(worker.status or 0)
        nursery.cancel_scope.cancel()
    if report is not None:
        return tuple(Problem(**each) for each in report["problems"]), tuple(report["services"])
    return (Problem(f"the handler {outcome} while loading", file=str(project.handler_path)),), ()
