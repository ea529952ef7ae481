"""Worker program of a handler trial; serves a single request that names the project."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.handler_service import load_project
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, exit_now, run_program
from ovmstrio.serving.kind import LoadContext, lease_nothing
from ovmstrio.telemetry.logs import configure_logs

_STANDARD_OUTPUT: Final = 1
_STANDARD_ERROR: Final = 2


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    del requests
    file, mounted_as = Path(first.value["file"]), first.value["mounted_as"]
    project, _ = read_project(file, mounted_as=mounted_as)
    if not mounted_as:
        os.chdir(project.directory)
        os.environ.update(project.environment)
    problems, services = await _try_load(project, is_alone=not mounted_as)
    report: dict[str, Any] = {"problems": [asdict(problem) for problem in problems], "services": list(services)}
    # The server kills the process after the answer.
    sys.stdout.flush()
    sys.stderr.flush()
    await first.answer(report)


async def _try_load(project: ProjectSpec, *, is_alone: bool) -> tuple[Sequence[Problem], Sequence[str]]:
    async with trio.open_nursery() as tasks:
        try:
            servable = await load_project(project, LoadContext(lease_nothing, tasks, is_alone=is_alone))
        except ConfigError as error:
            return error.problems, ()
        except ServerError as error:
            return [Problem(error.message, file=str(project.file))], ()
        await servable.aclose()
    return (), () if servable.declaration is None else servable.declaration.names


def main() -> None:
    """Serve the server whose socket descriptor is the first argument."""
    # Output of the handler must not mix with the server's standard output.
    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)
    configure_logs(level="ERROR")
    run_program(_serve)
    # Threads of the handler may never end.
    exit_now()


if __name__ == "__main__":
    main()
