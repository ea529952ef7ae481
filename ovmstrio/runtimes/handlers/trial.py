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

from ovmstrio.core.errors import Problem
from ovmstrio.core.request import ServableMetadata
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
from ovmstrio.work.user_code.exits import describe_exit

__all__ = ["TRIAL_SECONDS", "TriedHandler", "try_handler"]

TRIAL_SECONDS: Final = 120.0
"""How long a handler may take to be loaded."""

_PROCESS: Final = "ovmstrio.runtimes.handlers.trial_process"
_STANDARD_ERROR: Final = 2


class TriedHandler:
    """Stands for a handler that loads, without being it."""

    def __init__(self, name: str) -> None:
        self.metadata = ServableMetadata(name, "handler", (), ())

    async def aclose(self) -> None:
        """Nothing to do.  Never waits."""


async def try_handler(
    project: ProjectSpec, *, mounted_as: str = "", seconds: float = TRIAL_SECONDS
) -> tuple[Problem, ...]:
    """Load a project's handler elsewhere, close it, and give everything that is wrong with it.

    What the handler prints goes to standard error.

    Args:
        project: whose handler.
        mounted_as: the name under which it is served beside others; on its own it has its folder and its environment.
        seconds: until the process is killed.

    Ownership: the process, which has ended when this returns.
    Cancellation: kills it.
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
        return tuple(Problem(**each) for each in told)
    end = f"had not come to an end after {seconds:g} seconds" if done is None else describe_exit(done.returncode)
    return (Problem(f"the handler {end} while it was being loaded", file=str(project.handler_path)),)


def _told(report: Path) -> list[dict[str, Any]] | None:
    try:
        told: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return told
