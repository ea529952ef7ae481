"""``ovms custom-node``: build and check the libraries of custom nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import EX_USAGE, data_table, exit_on_error, fail, print_result
from ovmstrio.cli.problems import conclude, problem_facts, safe
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen, plain_rows, print_csv, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from ovmstrio.cli.custom_node_check import LibraryReport


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Build and check custom nodes of pipelines.")
    group.command()(build)
    group.command()(check)
    app.add_typer(group, name="custom-node")


def build(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A C or C++ file, or a directory of them.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="The library. Default: libcustom_node_<name>.so next to the source.",
        ),
    ] = None,
    flag: Annotated[
        list[str] | None,
        typer.Option("--flag", metavar="FLAG", help="Additional compiler flag, such as -lm. Repeatable."),
    ] = None,
) -> None:
    """Compile a library against the bundled interface. Exit code 1 on compiler errors.

    The compiler is $CC for C and $CXX for C++; the defaults are cc and c++. $CFLAGS, $CXXFLAGS and $LDFLAGS are used.
    """
    from ovmstrio.cli.custom_node_build import BuildError, NothingToBuildError, build_library

    with exit_on_error(1, BuildError), exit_on_error(EX_USAGE, NothingToBuildError):
        made = build_library(source, output, flag or [])
    print_result(f"[bold green]ok[/]: {safe(f'built {made}; try it: ovms custom-node check {made}')}")


def check(
    library: Annotated[
        str, typer.Argument(metavar="LIBRARY", help="A library, a .py file, or the name of a built-in node.")
    ],
    *,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="NAME=VALUE", help="Parameter of the node. Repeatable.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Timeout of the check.")
    ] = 60.0,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Load and initialize a custom node, show its inputs and outputs, and deinitialize it. Exit code 1 on errors.

    The check runs in a separate process, so that a crash of the library is reported, too.
    """
    from dataclasses import asdict

    from ovmstrio.cli.custom_node_check import check_library

    verdict = check_library(library, _params(param or []), timeout)
    form = chosen(form, as_json=as_json)
    facts = {"ok": problem_facts(verdict.problems)["ok"], **asdict(verdict)}
    if form is Output.CSV and not verdict.problems:
        print_csv(plain_rows(_items(verdict)))
        return
    if form is Output.TABLE and (verdict.inputs or verdict.outputs):
        print_table(_items(verdict))
    conclude(verdict.problems, f"{safe(library)}, no problem found", facts, output=form)


def _params(given: list[str]) -> dict[str, str]:
    params: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            fail(f"--param {each}: expected NAME=VALUE", EX_USAGE)
        params[name] = value
    return params


def _items(verdict: LibraryReport) -> Table:
    table = data_table("side", "name", "element type", "shape")
    for side, items in (("input", verdict.inputs), ("output", verdict.outputs)):
        for item in items:
            table.add_row(side, safe(item.name), safe(item.datatype or "unknown"), safe(str(list(item.shape))))
    return table
