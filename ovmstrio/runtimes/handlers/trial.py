"""Try a project's handler in a process of its own: user code cannot hurt who asks, and leaves nothing behind.

It is loaded there by the code that loads it to be served, its object and its models included, and closed again: what
loads here loads in a server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.servable import GrpcDeclaration
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
from ovmstrio.work.processes.program import describe_exit

__all__ = ["TRIAL_SECONDS", "TriedHandler", "try_handler", "try_mounted"]

TRIAL_SECONDS: Final = 120.0
"""How long a handler may take to be loaded."""

_PROCESS: Final = "ovmstrio.runtimes.handlers.trial_process"
_STANDARD_ERROR: Final = 2


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
    with tempfile.TemporaryDirectory(prefix="ovms-handler-") as folder:
        report = Path(folder) / "report.json"
        # Without -P, modules of the current directory would come before the server's.
        command = [sys.executable, "-P", "-m", _PROCESS, str(project.file), str(report), mounted_as]
        done: subprocess.CompletedProcess[bytes] | None = None
        with trio.move_on_after(seconds):
            done = await trio.run_process(command, stdin=subprocess.DEVNULL, stdout=_STANDARD_ERROR, check=False)
        told = await trio.to_thread.run_sync(_told, report)
    if told is not None:
        return tuple(Problem(**each) for each in told["problems"]), tuple(told["services"])
    end = f"had not come to an end after {seconds:g} seconds" if done is None else describe_exit(done.returncode)
    return (Problem(f"the handler {end} while it was being loaded", file=str(project.handler_path)),), ()


def _told(report: Path) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return told
