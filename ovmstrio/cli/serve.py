"""`ovms serve`: settings from the command line, the server, and its terminal output.

The options are generated from the fields of ``ServerSettings``, so that a setting is described in one place.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import EX_USAGE, fail, stderr
from ovmstrio.cli.ovms_arguments import ServeCommand
from ovmstrio.cli.problems import safe
from ovmstrio.cli.settings_options import server_parameters
from ovmstrio.util.deprecation import RENAMED_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.server.target import Target

HELP = """Serve models, graphs, a configuration, a project or a pipeline of Ops.

PATH is a model file, a folder of a model, of its versions or of several models, config.json, graph.pbtxt, a project
with nucleus.yaml, or the config.yml of a pipeline of Ops. A model has the name of its file or folder. The first Ctrl-C
or SIGTERM drains, the second stops at once.
"""
_EXAMPLES = """\
  ovms serve model.onnx            one model, called "model"; also .xml, .pdmodel, .tflite, .pb and .gguf
  ovms serve models/mine           a model folder, with or without versions, or a SavedModel
  ovms serve models/mine/1         one version of it
  ovms serve models                all models, graphs and projects in a folder, called like their folders
  ovms serve Qwen3-8B-int4-ov      a language, embedding, rerank or speech model
  ovms serve graph.pbtxt           a graph, or its folder
  ovms serve config.json           a configuration of many services
  ovms serve handlers/iris         a handler project (nucleus.yaml)
  ovms serve config.yml            a pipeline of Ops, with the script next to it

ovms demo serves the embedded samples; ovms prepare --list has models to try."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", cls=_Serve, help=HELP)(lambda: None)


class _Serve(ServeCommand):
    def make(self) -> Callable[..., None]:
        return _command(self.given)


def _command(settings: Collection[str] | None) -> Callable[..., None]:
    def serve(location: str | None = None, service: Path | None = None, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        if location is not None:
            _serve_target(_find(location), service, given)
        elif service is not None:
            from ovmstrio.cli.serve_service import run_pipeline_service

            run_pipeline_service(None, service, given)
        else:
            run_server(given)

    parameters = [_thing_parameter(), _service_parameter()]
    parameters += server_parameters(only=settings)
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def _find(location: str) -> Target:
    """Return what a path serves; exit with 1 if there is nothing, or a choice is needed."""
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.server.target import find_target

    try:
        target = find_target(location)
    except ConfigError as error:
        fail("\n       ".join(map(str, error.problems)))
    for problem in target.skipped:
        stderr().print(f"[yellow]warning:[/] not served: {safe(str(problem))}", highlight=False, soft_wrap=True)
    return target


def _serve_target(target: Target, service: Path | None, given: dict[str, Any]) -> None:
    from ovmstrio.cli.serve_project import run_project
    from ovmstrio.cli.serve_service import run_pipeline_service
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.server.target import TargetKind, find_ops_config

    if service is not None:
        run_pipeline_service(find_ops_config(target.path) or target.path, service, given)
    elif target.kind is TargetKind.HANDLER:
        run_project(target.path, given)
    elif target.kind is TargetKind.OPS:
        try:
            script = target.script
        except ConfigError as error:
            fail(str(error), EX_USAGE)
        run_pipeline_service(target.path, script, given)
    else:
        named = sorted(given.keys() & {"model_path", "config_path"})
        if named:
            from ovmstrio.server.settings import option_name

            fail(f"{option_name(named[0])} conflicts with the argument {target.path}; remove one of them", EX_USAGE)
        run_server({**target.options, **given})


def _thing_parameter() -> inspect.Parameter:
    help_text = "Model file, folder, configuration, graph or project; see above."
    argument = typer.Argument(metavar="PATH", help=help_text)
    kind = Annotated[str | None, argument]
    return inspect.Parameter("location", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)


def _service_parameter() -> inspect.Parameter:
    help_text = "Script of a pipeline of Ops; default: web_service.py, or the only script that calls run_service."
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
    from ovmstrio.util.interrupts import interruptible
    from ovmstrio.workers.serve import serve_in_processes

    freeze_imports()
    with usage():
        settings = read_settings(options)
    if settings.config_path is None and settings.model_name is None and not settings.allow_empty:
        fail(f"nothing to serve; expected a path, such as\n{_EXAMPLES}", EX_USAGE)
    set_up_logs(settings)
    _warn_of_old_names(settings)
    for name, reason in ignored_options(options).items():
        _warn(settings, f"{option_name(name)} has no effect: {reason}")

    async def run() -> bool:
        from ovmstrio.cli.progress import progress_bars
        from ovmstrio.cli.startup import show_startup
        from ovmstrio.util.progress import no_progress

        # Readers of the JSON log get nothing else on standard error; the log contains the same message.
        is_shown = settings.log_format == "pretty"
        show = partial(show_startup, settings=settings) if is_shown else None
        with progress_bars() if is_shown else nullcontext(no_progress) as progress:
            plan = await interruptible(partial(read_plan, settings, progress=progress))
        return await serve_in_processes(plan, show=show)

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
