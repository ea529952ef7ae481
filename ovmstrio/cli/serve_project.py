"""`ovms serve PROJECT`: server for one handler project, with JSON lines on standard output."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from ovmstrio.cli.console import fail, stderr
from ovmstrio.cli.serving import run_to_the_end, set_up_logs, usage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ovmstrio.core.errors import Problem
    from ovmstrio.handlers.config.project_spec import ProjectSpec


def run_project(path: Path, options: dict[str, Any]) -> None:
    """Serve a project until a signal stops it; exit with 64 for a wrong command line, with 1 for a failure."""
    from ovmstrio.server.plan import own_port, plan_project
    from ovmstrio.server.project_process import enter_project
    from ovmstrio.server.start_failures import log_failures
    from ovmstrio.workers.serve import serve_in_processes

    project = _read(path)
    with usage():
        plan = plan_project(project, options)
    enter_project(project, own_port(project, plan.settings))
    set_up_logs(plan.settings, project)
    raise typer.Exit(run_to_the_end(partial(serve_in_processes, plan), plan.settings, log_failures))


def _read(path: Path) -> ProjectSpec:
    """Read a project; print its problems, and exit with 1 if one is an error."""
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.handlers.config.project_file import read_project

    try:
        project, warnings = read_project(path.absolute())
    except ConfigError as error:
        _warn(problem for problem in error.problems if problem.severity == "warning")
        fail("\n       ".join(str(problem) for problem in error.problems if problem.severity == "error"))
    _warn(warnings)
    return project


def _warn(problems: Iterable[Problem]) -> None:
    from rich.markup import escape

    for problem in problems:
        stderr().print(f"[yellow]warning:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)
