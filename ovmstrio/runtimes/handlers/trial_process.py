"""The process in which a handler is tried; it writes down what it found, and ends whatever the handler started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import trio

from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.observability.logs import configure_logs
from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
from ovmstrio.runtimes.handlers.mounting import load_project
from ovmstrio.runtimes.kind import LoadContext, lease_nothing

__all__: list[str] = []


async def _tried(project: ProjectSpec, *, is_alone: bool) -> tuple[Sequence[Problem], Sequence[str]]:
    async with trio.open_nursery() as tasks:
        try:
            servable = await load_project(project, LoadContext(lease_nothing, tasks, is_alone=is_alone))
        except ConfigError as error:
            return error.problems, ()
        except ServerError as error:
            return [Problem(error.message, file=str(project.file))], ()
        await servable.aclose()
    return (), () if servable.declaration is None else servable.declaration.names


def _main() -> None:
    file, report, mounted_as = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    configure_logs(level="ERROR")
    project, _ = read_project(file, mounted_as=mounted_as)
    if not mounted_as:
        os.chdir(project.directory)
        os.environ.update(project.environment)
    problems, services = trio.run(lambda: _tried(project, is_alone=not mounted_as))
    unfinished = report.with_suffix(".part")
    told = {"problems": [asdict(problem) for problem in problems], "services": list(services)}
    unfinished.write_text(json.dumps(told), encoding="utf-8")
    unfinished.replace(report)
    # Threads that the handler started may go on for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
