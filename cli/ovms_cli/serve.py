"""`ovms serve`: settings from the command line, the server, and what is seen of it on a terminal.

The options are made from the fields of ``ServeSettings``, so that a setting is described in one place.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ovms_cli.console import EX_USAGE, fail, stderr
from ovms_cli.serve_project import run_project
from ovms_cli.serve_service import run_pipeline_service

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic.fields import FieldInfo

    from ovmstrio.server.settings import ServeSettings
    from ovmstrio.server.supervisor import Running

__all__ = ["register", "run_server"]

HELP = """Serve models over gRPC and REST, a handler project, or a pipeline of Ops.

Give the folder or the [bold]nucleus.yaml[/] of a project, a pipeline's [bold]config.yml[/] with [bold]--service[/],
[bold]--config_path[/] for many models, [bold]--model_name[/] and [bold]--model_path[/] for one, or nothing for the
embedded samples. The first Ctrl-C or SIGTERM drains, the second stops at once. Options may be spelled with _ or with -.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", help=HELP)(_command())


def _command() -> Callable[..., None]:
    from ovmstrio.server.settings import ServeSettings

    def serve(project: Path | None = None, service: Path | None = None, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        if service is not None:
            run_pipeline_service(project, service, given)
        elif project is None:
            run_server(given)
        else:
            run_project(project, given)

    parameters = [_project_parameter(), _service_parameter()]
    parameters += [_parameter(name, field) for name, field in ServeSettings.model_fields.items()]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def _project_parameter() -> inspect.Parameter:
    help_text = (
        "A handler project: its folder, or its nucleus.yaml. With --service, the config.yml of a pipeline of Ops."
    )
    argument = typer.Argument(help=help_text, show_default=False)
    kind = Annotated[Path | None, argument]
    return inspect.Parameter("project", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)


def _service_parameter() -> inspect.Parameter:
    help_text = "The script of a pipeline of Ops, such as web_service.py."
    option = typer.Option("--service", help=help_text, show_default=False, metavar="SCRIPT")
    kind = Annotated[Path | None, option]
    return inspect.Parameter("service", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Make an option of a setting; a flag stays one, anything else is read as text and judged by the settings."""
    flag = field.annotation is bool or bool in get_args(field.annotation)
    extra = field.json_schema_extra
    option = typer.Option(
        f"--{name}/--no_{name}" if flag else f"--{name}",
        help=field.description,
        rich_help_panel=str(extra["group"]) if isinstance(extra, dict) else None,
        show_default=False if field.default is None else str(field.default),
        metavar=None if flag else "TEXT" if field.annotation is str else "VALUE",
    )
    kind: Any = bool if flag else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def run_server(options: dict[str, Any]) -> None:
    """Run a server until it is told to stop; exits with 64 for a wrong command line, with 1 for a failure."""
    import trio

    from ovmstrio.observability.logs import configure_logs
    from ovmstrio.server.command_line import UsageProblems, ignored_options, read_settings
    from ovmstrio.server.freed_memory import keep_freed_memory

    try:
        settings = read_settings(options)
    except UsageProblems as problems:
        fail("\n       ".join(problems.lines), EX_USAGE)
    if settings.readiness_file is not None:
        fail("--readiness_file is for a handler project; models tell their readiness at /v2/health/ready", EX_USAGE)
    if settings.config_path is None and settings.model_name is None:
        settings = settings.model_copy(update={"config_path": _embedded_samples()})
    try:
        configure_logs(level=settings.log_level, fmt=settings.log_format, path=settings.log_path)
    except OSError as error:
        fail(f"--log_path: {settings.log_path} cannot be opened: {error.strerror}")
    for name, reason in ignored_options(options).items():
        stderr().print(f"[yellow]warning:[/] --{name} has no effect: {reason}", highlight=False)
    keep_freed_memory()
    code = trio.run(_run, settings)
    raise typer.Exit(code)


def _embedded_samples() -> Path:
    from platformdirs import user_cache_path

    from ovmstrio_samples import prepare_repository

    path = prepare_repository(user_cache_path("ovmstrio"))
    stderr().print(f"[dim]no model named: serving the embedded samples of {path}[/]", highlight=False)
    return path


async def _run(settings: ServeSettings) -> int:
    """Serve, show the start-up, and turn what ends the server into an exit code."""
    import trio
    from rich.markup import escape

    from ovms_cli.startup import explain, show_startup, spare_the_collector
    from ovmstrio.core.errors import ServerError
    from ovmstrio.server.supervisor import serve

    reasons: list[str] = []
    gently = False

    async def serve_to_the_end(*, task_status: trio.TaskStatus[Running]) -> None:
        nonlocal gently
        gently = await serve(settings, task_status=task_status)
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            running = await nursery.start(serve_to_the_end)
            nursery.start_soon(show_startup, running)
            nursery.start_soon(spare_the_collector, running)
    except* (ServerError, OSError) as group:
        reasons += explain(group, settings)
    for reason in reasons:
        stderr().print(f"[bold red]error:[/] {escape(reason)}", highlight=False, soft_wrap=True)
    return 0 if gently and not reasons else 1
