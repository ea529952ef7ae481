"""`ovms run`: a server for the unchanged script of a pipeline service."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovms_cli.console import EX_USAGE, fail
from ovms_cli.ovms_lines import LateCommand
from ovms_cli.serve_service import serve_script
from ovms_cli.serving import server_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HELP = """Run a pipeline service's script, such as a [bold]web_service.py[/] of Paddle Serving, unchanged.

The script can import [bold]paddle_serving_server[/] and [bold]paddle_serving_app[/]. [bold]-c FILE[/] replaces the
configuration that the script names. The script receives all other arguments that follow it.
"""
_EACH: Final = "give --grpc_bind_address and --rest_bind_address"


def register(app: typer.Typer) -> None:
    """Add the command."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    app.command("run", cls=_Run, help=HELP, context_settings=settings)(lambda: None)


class _Run(LateCommand):
    @staticmethod
    def make() -> Callable[..., None]:
        return _command()


def _command() -> Callable[..., None]:
    def run(
        script: Path,
        arguments: list[str] | None = None,
        config: str | None = None,
        bind_address: str | None = None,
        **options: Any,
    ) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        if bind_address is not None:
            if "unix:" in bind_address:
                fail(f"--bind_address: {bind_address}: gRPC and REST need separate socket files: {_EACH}", EX_USAGE)
            given = {"grpc_bind_address": bind_address, "rest_bind_address": bind_address, **given}
        own, left = _take_config(arguments or [])
        file = config or own
        if file is not None and not Path(file).is_file():
            fail(f"{file}: no such file; -c names the pipeline's config.yml", EX_USAGE)
        serve_script(script, left, file, given)

    parameters = [
        _parameter("script", Path, typer.Argument(help="The service's script.", exists=True, dir_okay=False), ...),
        _parameter("arguments", list[str] | None, typer.Argument(help="-c FILE, and the arguments of the script.")),
        _parameter(
            "config", str | None, typer.Option("-c", "--config", help="Configuration that replaces the script's own.")
        ),
        _parameter("bind_address", str | None, typer.Option(help="Addresses to listen on, comma separated.")),
        *server_parameters(without=("config_path",)),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    given = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=given, annotation=Annotated[kind, info]
    )


def _take_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take ``-c FILE`` or ``--config FILE`` out of a script's arguments."""
    left = list(arguments)
    for index, argument in enumerate(left):
        name, equals, value = argument.partition("=")
        if name not in {"-c", "--config"}:
            continue
        if equals:
            return value, left[:index] + left[index + 1 :]
        if index + 1 == len(left):
            fail(f"{argument} needs a file", EX_USAGE)
        return left[index + 1], left[:index] + left[index + 2 :]
    return None, left
