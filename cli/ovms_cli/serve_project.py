"""`ovms serve PROJECT`: a handler project alone, with JSON lines on standard output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import typer

from ovms_cli.console import EX_USAGE, fail, stderr

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pydantic_core import ErrorDetails

    from ovmstrio.core.errors import Problem
    from ovmstrio.project_server.settings import ProjectSettings
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec

__all__ = ["run_project"]

_SHARED: Final = ("port", "drain_delay", "drain_seconds", "tls_cert", "tls_key", "client_ca", "readiness_file", "debug")
"""Options that mean the same as for models; of gRPC or HTTP there is only the one port."""


_OF_PIPELINES: Final = re.compile(rb"(?m)^(rpc_port|http_port|dag|op)\s*:")
"""Keys of the configuration of a pipeline of Ops, which no project has."""


def run_project(path: Path, options: dict[str, Any]) -> None:
    """Serve a project until it is told to stop; exits with 64 for a wrong command line, with 1 for a failure."""
    import trio

    from ovmstrio.core.errors import ConfigError
    from ovmstrio.project_server.environment import enter_project
    from ovmstrio.project_server.listening import port_of
    from ovmstrio.project_server.logs import configure_project_logs
    from ovmstrio.runtimes.handlers.config.project_file import read_project

    try:
        project, warnings = read_project(path.absolute())
    except ConfigError as error:
        _refuse_pipeline(path)
        _warn(problem for problem in error.problems if problem.severity == "warning")
        fail("\n       ".join(str(problem) for problem in error.problems if problem.severity == "error"))
    _warn(warnings)
    settings = _settings(project, options)
    enter_project(project, port_of(project, settings))
    configure_project_logs(project.log_level)
    raise typer.Exit(trio.run(_run, project, settings))


def _refuse_pipeline(path: Path) -> None:
    """Tell how a pipeline of Ops is served, if that is what was given in a project's place."""
    config = path / "config.yml" if path.is_dir() else path
    if config.is_file() and _OF_PIPELINES.search(config.read_bytes()):
        way_out = "add --service SCRIPT, with the script that makes the Ops, such as web_service.py"
        fail(f"{config} configures a pipeline of Ops; {way_out}", EX_USAGE)


def _warn(problems: Iterable[Problem]) -> None:
    from rich.markup import escape

    for problem in problems:
        stderr().print(f"[yellow]warning:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)


def _settings(project: ProjectSpec, options: dict[str, Any]) -> ProjectSettings:
    from pydantic import ValidationError

    from ovmstrio.project_server.settings import ProjectSettings

    address = "rest_bind_address" if project.protobuf_path is None else "grpc_bind_address"
    foreign = sorted(set(options) - {*_SHARED, address})
    if foreign:
        names = ", ".join(f"--{name}" for name in foreign)
        fail(f"{names} cannot be used with a project; its nucleus.yaml has the settings of the handler", EX_USAGE)
    given = {name: value for name, value in options.items() if name in _SHARED}
    if address in options:
        given["bind_address"] = options[address]
    try:
        return ProjectSettings.model_validate(given)
    except ValidationError as error:
        fail("\n       ".join(map(_fault, error.errors())), EX_USAGE)


def _fault(error: ErrorDetails) -> str:
    """Say what is wrong with an option, or with several of them together."""
    if not error["loc"]:
        return str(error["ctx"]["error"])
    return f"--{error['loc'][0]}: {error['msg']}, found {error['input']!r}"


async def _run(project: ProjectSpec, settings: ProjectSettings) -> int:
    """Serve, log what ends the server, and turn it into an exit code."""
    from ovmstrio.project_server.failures import log_failures
    from ovmstrio.project_server.serving import serve_project

    gently = failed = False
    try:
        gently = await serve_project(project, settings)
    except* Exception as group:  # noqa: BLE001 - the border of the process
        failed = True
        log_failures(group)
    return 0 if gently and not failed else 1
