"""`ovms paddle run`: a server for the unchanged script of a pipeline service."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.console import EX_USAGE, fail
from ovmstrio.cli.serve_service import serve_script
from ovmstrio.cli.settings_options import ServerCommand, server_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HELP = """Run a pipeline service's script, such as a web_service.py of Paddle Serving, unchanged.

The script can import paddle_serving_server and paddle_serving_app. -c FILE replaces the
configuration that the script names. The script receives the arguments that follow it; options of the server come
before the script. Arguments after -- are the script's, also if they look like options of the server.
"""
_CONFIG_OPTIONS: Final = ("-c", "--config")
_LITERAL_OPTION: Final = re.compile(r"""["'](--?[A-Za-z][\w-]*)["'=]""")
"""An option in Python source, such as ``"--config"``."""
_PARSER: Final = "ArgumentParser"
_EACH: Final = "give --grpc-bind-address and --rest-bind-address"


def register(app: typer.Typer) -> None:
    """Add the command."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    app.command("run", cls=_Run, help=HELP, context_settings=settings)(lambda: None)


class _Run(ServerCommand):
    def make(self) -> Callable[..., None]:
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
                fail(f"--bind-address: {bind_address}: gRPC and REST need separate socket files: {_EACH}", EX_USAGE)
            given = {"grpc_bind_address": bind_address, "rest_bind_address": bind_address, **given}
        own, left = _script_arguments(script, arguments or [])
        file = config or own
        if file is not None and not Path(file).is_file():
            fail(f"{file}: no such file; -c names the pipeline's config.yml", EX_USAGE)
        serve_script(script, left, file, given)

    parameters = [
        _parameter(
            "script",
            Path,
            typer.Argument(help="The service's script.", metavar="SCRIPT", exists=True, dir_okay=False),
            ...,
        ),
        _parameter(
            "arguments",
            list[str] | None,
            typer.Argument(metavar="ARGUMENTS", help="Arguments of the script, such as -c FILE."),
        ),
        _parameter(
            "config",
            str | None,
            typer.Option("-c", "--config", metavar="FILE", help="Configuration that replaces the script's own."),
        ),
        _parameter(
            "bind_address",
            str | None,
            typer.Option("--bind-address", metavar="ADDRESSES", help="Addresses to listen on, comma separated."),
        ),
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


def _script_arguments(script: Path, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the configuration that arguments after a script name, and the arguments that the script receives.

    A script's own option ``--config`` is only the script's. Exits with 64 for options of the server.
    """
    if arguments and arguments[0] == "--":
        return None, list(arguments[1:])
    given = [argument.partition("=")[0] for argument in arguments]
    own = _own_options(script)
    misplaced = [option for option in given if option not in own and _is_server_option(option)]
    if misplaced:
        listed = ", ".join(dict.fromkeys(misplaced))
        hint = f"options of the server come before {script}; for an option of the script write -- before it"
        fail(f"{listed}: {hint}", EX_USAGE)
    at = next((index for index, option in enumerate(given) if option in _CONFIG_OPTIONS), None)
    if at is None or given[at] in own:
        return None, list(arguments)
    if given[at] != arguments[at]:
        value, end = arguments[at].partition("=")[2], at + 1
    elif at + 1 == len(arguments):
        fail(f"{given[at]} needs a file", EX_USAGE)
    else:
        value, end = arguments[at + 1], at + 2
    # A parser of the script without this option would refuse it.
    return value, [*arguments[:at], *arguments[end:]] if _PARSER in own else list(arguments)


def _own_options(script: Path) -> set[str]:
    """Return the options that a script and the modules next to it name, and ``_PARSER`` if the script has a parser."""
    from ovmstrio.serving.fingerprints import python_files

    names: set[str] = set()
    for file in {script, *python_files(script.parent)}:
        text = file.read_text(encoding="utf-8", errors="replace")
        names.update(_LITERAL_OPTION.findall(text))
        names |= {_PARSER} if file == script and _PARSER in text else set()
    return names


def _is_server_option(option: str) -> bool:
    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.util.deprecation import RENAMED_SETTINGS

    name = option[2:].replace("-", "_").removeprefix("no_") if option.startswith("--") else ""
    return name in {"bind_address", *ServerSettings.model_fields, *RENAMED_SETTINGS}
