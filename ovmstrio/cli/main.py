"""The `ovms` command: registration of the commands, and their common options and exit codes.

Each command is a module with a function ``register(app)``, imported when the command line names the command. The
modules are light to import: a command imports its dependencies when it runs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.commands import App, Group, suggest
from ovmstrio.cli.console import EX_INTERRUPTED, EX_USAGE, print_message
from ovmstrio.cli.help_text import Entry
from ovmstrio.cli.ovms_arguments import OWN_OPTIONS, begins_like_ovms
from ovmstrio.server.gc_tuning import set_serving_gc_threshold
from ovmstrio.util.deprecation import RENAMED_COMMANDS, RENAMED_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

PANELS: Final[Mapping[str, Mapping[str, str]]] = {
    "Serve": {
        "serve": "Serve a model, a folder of models, a configuration or a project.",
        "demo": "Serve the embedded samples, and show calls and their answers.",
        "paddle": "Run, stop and watch services of Paddle Serving.",
    },
    "Call": {
        "infer": "Call a model, a graph, a pipeline or a handler.",
        "stream": "Stream to a graph, and show its responses as they arrive.",
        "chat": "Chat with a text model.",
        "sequence": "Stream data through a stateful model; list its sequences.",
    },
    "Inspect": {
        "models": "List the models of a server with their states and tensors.",
        "health": "Check whether a server or a model is ready.",
        "top": "Watch rates, latencies, queues and memory of a server.",
        "profile": "Profile a running server and the layers of its models.",
    },
    "Prepare": {
        "prepare": "Convert a model file into an entry of a model repository.",
        "check": "Load everything that a configuration names; report problems.",
        "migrate": "Convert the configuration of another server.",
        "graph": "Check or draw graph files.",
        "pipeline": "Check or draw the pipelines of a configuration file.",
    },
    "Build": {
        "custom-node": "Build or check the library of a custom node.",
        "handler": "Write the Dockerfile of a handler project.",
    },
    "Deploy": {
        "deploy": "Deploy a configuration to a cluster.",
        "keys": "Create, list and revoke the keys of callers.",
    },
    "Help": {"help": "Explain the options of a server by topic, or a command."},
}
"""Commands with their summaries, in the groups and the order of the help; each is a module of this package."""

COMMANDS: Final = {name: summary for commands in PANELS.values() for name, summary in commands.items()}

_SERVE: Final = "serve"


class Commands(Group):
    """Group of all commands; options of a server in place of a command mean ``serve``."""

    _has_options = True

    def get_params(self, ctx: Any) -> Any:
        """Return the options, none if the first argument is a command.

        typer converts the values of unset options with pydantic, which takes 0.1 s to import.
        """
        return super().get_params(ctx) if self._has_options else []

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        del ctx
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            app = App()
            import_module(f"ovmstrio.cli.{cmd_name.replace('-', '_')}").register(app)
            self.commands.update(typer.main.get_group(app).commands)
        return self.commands.get(cmd_name)

    def entries(self, ctx: Any) -> list[Entry]:
        """Return a row for each command, without importing one."""
        del ctx
        return [Entry(panel, name, summary) for panel, rows in PANELS.items() for name, summary in rows.items()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``serve`` before arguments that begin with an option of a server, and replace old names."""
        if begins_like_ovms(args):
            args = [_SERVE, *args]
        elif args and args[0] in RENAMED_COMMANDS:
            renamed = RENAMED_COMMANDS[args[0]]
            if not ctx.resilient_parsing:
                print_message(f"ovms {args[0]} is deprecated; use ovms {renamed}")
            args = [*renamed.split(), *args[1:]]
        self._has_options = not args or args[0].startswith("-")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first argument names; exit with 64 and suggestions if there is none."""
        name = _spell_with_hyphens(args[0])
        if name not in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}.{suggest(name, [*COMMANDS, *RENAMED_COMMANDS])}")
        return super().resolve_command(ctx, [name, *args[1:]])


def command_line() -> typer.Typer:
    """Create the command line; commands are imported on use."""
    app = App(
        name="ovms",
        cls=Commands,
        help="Serve OpenVINO models and the Python code around them.",
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _spell_with_hyphens},
    )
    app.callback()(_options)
    return app


def main() -> None:
    """Run the command line; usage errors exit with 64, as in OVMS, other failures with 1."""
    # The class is in a private package of typer, so it is found through a public subclass.
    usage_error: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "UsageError")
    usage_error.exit_code = EX_USAGE
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first != _SERVE and (first[:2] != "--" or first in OWN_OPTIONS):
        # A server sets the threshold after it has loaded.
        set_serving_gc_threshold()
    try:
        command_line()()
    except KeyboardInterrupt:
        raise SystemExit(EX_INTERRUPTED) from None


def _spell_with_hyphens(name: str) -> str:
    spelt = name.replace("-", "_")
    return RENAMED_SETTINGS.get(spelt, spelt).replace("_", "-")


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
