"""``ovms custom-node``: build and check the libraries of custom nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovms_cli.console import EX_USAGE, fail, stdout
from ovms_cli.problems import count_problems, safe, show_problems

if TYPE_CHECKING:
    from ovms_cli.custom_node_check import Item, Verdict

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Build and check custom nodes of pipelines.")
    group.command()(build)
    group.command()(check)
    app.add_typer(group, name="custom-node")


def build(
    source: Annotated[
        Path, typer.Argument(help="a C or C++ file, or a directory of them", show_default=False, metavar="PATH")
    ],
    *,
    output: Annotated[
        Path | None, typer.Option(help="the library; libcustom_node_<name>.so beside the source", show_default=False)
    ] = None,
    flag: Annotated[
        list[str] | None, typer.Option(help="a further flag for the compiler, such as -lm", show_default=False)
    ] = None,
) -> None:
    """Compile a library against the interface that is shipped: exits with 1 if the compiler finds an error.

    The compiler is $CC for C and $CXX for C++, or else cc and c++; $CFLAGS, $CXXFLAGS and $LDFLAGS are heeded.
    """
    from ovms_cli.custom_node_build import BuildError, NothingToBuildError, build_library

    try:
        made = build_library(source, output, flag or [])
    except NothingToBuildError as error:
        fail(str(error), EX_USAGE)
    except BuildError as error:
        fail(str(error))
    shown = safe(f"built {made}; try it: ovms custom-node check {made}")
    stdout().print(f"[bold green]ok[/]: {shown}", highlight=False, soft_wrap=True)


def check(
    library: Annotated[
        str, typer.Argument(help="a library, a .py file, or the name of a built-in node", show_default=False)
    ],
    *,
    param: Annotated[
        list[str] | None, typer.Option(help="a parameter of the node: name=value", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds that all of it may take", min=0.1)] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="answer in JSON")] = False,
) -> None:
    """Load and initialize a custom node, show what it takes and gives, and deinitialize it: exits with 1 on an error.

    All of it happens in a process of its own, so that a crash of the library is told as well.
    """
    from ovms_cli.custom_node_check import check_library

    verdict = check_library(library, _params(param or []), timeout)
    if as_json:
        _print_json(verdict)
    else:
        _show(library, verdict)
    raise typer.Exit(1 if verdict.errors else 0)


def _params(given: list[str]) -> dict[str, str]:
    params: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            fail(f"--param {each}: write name=value", EX_USAGE)
        params[name] = value
    return params


def _print_json(verdict: Verdict) -> None:
    import json
    from dataclasses import asdict

    typer.echo(json.dumps({"ok": not verdict.errors, **asdict(verdict)}, indent=2))


def _show(library: str, verdict: Verdict) -> None:
    if verdict.inputs or verdict.outputs:
        _show_items(verdict.inputs, verdict.outputs)
    if verdict.problems:
        show_problems(verdict.problems)
    mark = "[bold red]not ok[/]" if verdict.errors else "[bold green]ok[/]"
    found = count_problems(verdict.problems) if verdict.problems else f"{safe(library)}, no problem found"
    stdout().print(f"{mark}: {found}", highlight=False, soft_wrap=True)


def _show_items(inputs: tuple[Item, ...], outputs: tuple[Item, ...]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in ("", "name", "element type", "shape"):
        table.add_column(column, overflow="fold")
    for side, items in (("input", inputs), ("output", outputs)):
        for item in items:
            table.add_row(side, safe(item.name), item.datatype or "unknown", safe(str(list(item.shape))))
    stdout().print(table)
