"""The `ovms` command: registration of the commands, and their common options and exit codes.

Each command is a module with a function ``register(app)``. The modules are light to import: a command imports its
dependencies when it runs. If the command line names a command, only its module is imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.console import EX_INTERRUPTED, EX_USAGE
from ovmstrio.cli.ovms_lines import OWN_OPTIONS, Commands
from ovmstrio.server.gc_tuning import set_serving_gc_threshold
from ovmstrio.util.deprecation import RENAMED_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COMMANDS: Final = (
    "serve",
    "stop",
    "demo",
    "infer",
    "stream",
    "top",
    "models",
    "sequence",
    "sequences",
    "health",
    "chat",
    "check",
    "graph",
    "pipeline",
    "custom-node",
    "generate",
    "deploy",
    "prepare",
    "migrate",
    "run",
    "trace",
    "profile",
    "keys",
)
"""The commands in the order in which help lists them; each is a module of this package."""

_SERVE: Final = ("serve",)

_COMPLETION: Final = "_OVMS_COMPLETE"
"""Environment variable that a shell sets to request completions."""


def command_line(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Create the command line with some commands, or all of them."""
    app = typer.Typer(
        name="ovms",
        cls=Commands,
        help="Serve OpenVINO models and the Python code around them.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _spell_with_underscores},
    )
    app.callback()(_options)
    for name in names:
        import_module(f"ovmstrio.cli.{_spell_with_underscores(name)}").register(app)
    return app


def main() -> None:
    """Run the command line; usage errors exit with 64, as in OVMS, other failures with 1."""
    # The class is in a private package of typer, so it is found through a public subclass.
    usage_error: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "UsageError")
    usage_error.exit_code = EX_USAGE
    names = _possible_commands(sys.argv[1:])
    if names != _SERVE:
        # A server sets the threshold after it has loaded.
        set_serving_gc_threshold()
    try:
        command_line(names)()
    except KeyboardInterrupt:
        raise SystemExit(EX_INTERRUPTED) from None


def _possible_commands(arguments: Sequence[str]) -> Sequence[str]:
    """Return the commands to register: the named command, ``serve`` if the line begins with an option, or all."""
    first = arguments[0] if arguments else ""
    if _COMPLETION not in os.environ:
        if first in COMMANDS:
            return (first,)
        if first.startswith("--") and first not in OWN_OPTIONS:
            return _SERVE
    return COMMANDS


def _spell_with_underscores(name: str) -> str:
    spelt = name.replace("-", "_")
    return RENAMED_SETTINGS.get(spelt, spelt)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"ovmstrio {version('ovmstrio')}, OpenVINO {version('openvino')}")
        raise typer.Exit


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve OpenVINO models and the Python code around them."""
    del version
