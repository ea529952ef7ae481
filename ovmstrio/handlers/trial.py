"""Try a project's handler in a process of its own: user code cannot hurt who asks, and leaves nothing behind.

It is loaded there by the code that loads it to be served, its object and its models included, and closed again: what
loads here loads in a server.
"""

from __future__ import annotations

from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.service import GrpcDeclaration
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.isolation.program import describe_exit
from ovmstrio.isolation.worker_process import WorkerEnded, WorkerProcess

__all__ = ["TRIAL_SECONDS", "TriedHandler", "try_handler", "try_mounted"]

TRIAL_SECONDS: Final = 120.0
"""How long a handler may take to be loaded."""

_PROGRAM: Final = "ovmstrio.handlers.trial_program"


class TriedHandler:
    """Stands for a handler that loads, without being it; ``declaration`` names the gRPC services that it brings."""

    def __init__(self, name: str, declaration: GrpcDeclaration | None) -> None:
        self.metadata = ServableMetadata(name, "handler", (), ())
        self.declaration = declaration

    async def aclose(self) -> None:
        """Nothing to do.  Never waits."""


async def try_mounted(project: ProjectSpec, name: str) -> TriedHandler:
    """Try a project that is served beside others under a name, and give what stands for it.

    Raises:
        ConfigError: it cannot be loaded.

    Ownership, cancellation: as :func:`try_handler`.
    """
    problems, services = await _try(project, name, TRIAL_SECONDS)
    if problems:
        raise ConfigError(problems)
    declaration = GrpcDeclaration(services, str(project.protobuf_path), {}) if services else None
    return TriedHandler(name, declaration)


async def try_handler(project: ProjectSpec, *, seconds: float = TRIAL_SECONDS) -> tuple[Problem, ...]:
    """Load the handler of a project elsewhere, close it, and give everything that is wrong with it.

    What the handler prints goes to standard error.

    Args:
        project: whose handler.
        seconds: until the process is killed.

    Ownership: the process, which has ended when this returns.
    Cancellation: kills it.
    """
    return (await _try(project, "", seconds))[0]


async def _try(project: ProjectSpec, mounted_as: str, seconds: float) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Give what is wrong with a handler, and the gRPC services that it brings.

    On its own it has its folder and its environment, mounted under a name it has not.
    """
    told: dict[str, Any] | None = None
    end = f"had not come to an end after {seconds:g} seconds"
    worker = WorkerProcess(_PROGRAM)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(seconds):
            try:
                told = await worker.start(nursery, {"file": str(project.file), "mounted_as": mounted_as})
            except WorkerEnded:
                await worker.ended.wait()
                end = describe_exit(worker.status or 0)
        nursery.cancel_scope.cancel()
    if told is not None:
        return tuple(Problem(**each) for each in told["problems"]), tuple(told["services"])
    return (Problem(f"the handler {end} while it was being loaded", file=str(project.handler_path)),), ()
