"""The `ovms` command: gathers the commands and settles what they share.

Each command lives in a module of its own, which is light to import and offers ``register(app)``; what a command works
with is imported when it runs, so that ``ovms --help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ovms_cli import (
    chat,
    check,
    custom_node,
    demo,
    deploy,
    generate,
    graph,
    health,
    infer,
    keys,
    models,
    pipeline,
    prepare,
    profile,
    run,
    sequence,
    sequences,
    serve,
    stop,
    stream,
    top,
    trace,
)
from ovms_cli.console import EX_INTERRUPTED, EX_USAGE
from ovms_cli.ovms_lines import Commands
from ovmstrio.server.collector import collect_rarely

__all__ = ["app", "main"]


def _spell_with_underscores(name: str) -> str:
    return name.replace("-", "_")


app = typer.Typer(
    name="ovms",
    cls=Commands,
    help="Serve OpenVINO models and the Python code around them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _spell_with_underscores},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"ovmstrio {version('ovmstrio')}, OpenVINO {version('openvino')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Serve OpenVINO models and the Python code around them."""
    del version


_COMMANDS = (
    serve,
    stop,
    demo,
    infer,
    stream,
    top,
    models,
    sequence,
    sequences,
    health,
    chat,
    check,
    graph,
    pipeline,
    custom_node,
    generate,
    deploy,
    prepare,
    run,
    trace,
    profile,
    keys,
)
for module in _COMMANDS:
    module.register(app)


def main() -> None:
    """Run the command line; usage errors exit with 64, as OVMS's do, other failures with 1."""
    collect_rarely()
    # The class is in a package that typer keeps to itself, and so it is found through one that it shows.
    usage_error: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "UsageError")
    usage_error.exit_code = EX_USAGE
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(EX_INTERRUPTED) from None
