"""`ovms serve`: settings from the command line, the server, and its terminal output.

The options are generated from the fields of ``ServerSettings``, so that a setting is described in one place.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import stderr
from ovmstrio.cli.ovms_lines import ServeCommand
from ovmstrio.cli.problems import safe
from ovmstrio.cli.settings_options import server_parameters
from ovmstrio.util.deprecation import RENAMED_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.server.settings import ServerSettings

HELP = """Serve models over gRPC and REST, a handler project, or a pipeline of Ops.

Pass the folder or the nucleus.yaml of a project, a pipeline's config.yml with --service, --config-path for many
models, --model-name and --model-path for one, or nothing for the embedded samples. The first Ctrl-C or SIGTERM drains,
the second stops at once.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", cls=_Serve, help=HELP)(lambda: None)


class _Serve(ServeCommand):
    @staticmethod
    def make() -> Callable[..., None]:
        return _command()


def _command() -> Callable[..., None]:
    def serve(project: Path | None = None, service: Path | None = None, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        from ovmstrio.cli.serve_project import run_project
        from ovmstrio.cli.serve_service import run_pipeline_service

        if service is not None:
            run_pipeline_service(project, service, given)
        elif project is None:
            run_server(given)
        else:
            run_project(project, given)

    parameters = [_project_parameter(), _service_parameter()]
    parameters += server_parameters()
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def _project_parameter() -> inspect.Parameter:
    help_text = "Folder or nucleus.yaml of a handler project. With --service, the config.yml of a pipeline of Ops."
    argument = typer.Argument(metavar="PROJECT", help=help_text)
    kind = Annotated[Path | None, argument]
    return inspect.Parameter("project", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)


def _service_parameter() -> inspect.Parameter:
    help_text = "Script of a pipeline of Ops; for example web_service.py."
    option = typer.Option("--service", help=help_text, show_default=False, metavar="SCRIPT")
    kind = Annotated[Path | None, option]
    return inspect.Parameter("service", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def run_server(options: dict[str, Any]) -> None:
    """Run a server until a signal stops it; exit with 64 for a wrong command line, with 1 for a failure."""
    from ovmstrio.cli.serving import run_to_the_end, set_up_logs, usage
    from ovmstrio.server.command_line import ignored_options, read_settings
    from ovmstrio.server.gc_tuning import freeze_imports
    from ovmstrio.server.plan import read_plan
    from ovmstrio.server.settings import option_name
    from ovmstrio.workers.serve import serve_in_processes

    freeze_imports()
    with usage():
        settings = read_settings(options)
    if settings.config_path is None and settings.model_name is None:
        settings = settings.model_copy(update={"config_path": _embedded_samples()})
    set_up_logs(settings)
    _warn_of_old_names(settings)
    for name, reason in ignored_options(options).items():
        _warn(settings, f"{option_name(name)} has no effect: {reason}")

    async def run() -> bool:
        from ovmstrio.cli.startup import show_startup

        # Readers of the JSON log get nothing else on standard error; the log contains the same message.
        show = show_startup if settings.log_format == "pretty" else None
        return await serve_in_processes(await read_plan(settings), show=show)

    raise typer.Exit(run_to_the_end(run, settings))


def _warn_of_old_names(settings: ServerSettings) -> None:
    from ovmstrio.server.settings import option_name

    given = {argument.partition("=")[0].removeprefix("--").replace("-", "_") for argument in sys.argv[1:]}
    for name in sorted(given & RENAMED_SETTINGS.keys()):
        _warn(settings, f"{option_name(name)} is deprecated; use {option_name(RENAMED_SETTINGS[name])}")


def _warn(settings: ServerSettings, text: str) -> None:
    """Print a warning; readers of the JSON log get it as a record instead."""
    import structlog

    if settings.log_format == "pretty":
        stderr().print(f"[yellow]warning:[/] {safe(text)}", highlight=False)
    else:
        structlog.get_logger(__name__).warning(text)


def _embedded_samples() -> Path:
    from platformdirs import user_cache_path

    from ovmstrio.samples import prepare_repository

    path = prepare_repository(user_cache_path("ovmstrio"))
    stderr().print(f"[dim]no model named: serving the embedded samples of {safe(str(path))}[/]", highlight=False)
    return path
