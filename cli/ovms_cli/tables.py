"""The one way in which commands show data: as a table for people, as CSV or as JSON for programs.

On a terminal a table is as wide as it; below sixty columns each row is a block of lines.  In a pipe every row is one
line, however long, so that names stay whole for ``grep`` and ``awk``.
"""

from __future__ import annotations

import csv
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovms_cli.console import print_json, stdout

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Output", "OutputOption", "print_table", "show_data"]

_NARROW: Final = 60
_WIDEST: Final = 10_000


class Output(StrEnum):
    """How data is shown."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


OutputOption = Annotated[Output, typer.Option("--output", help="How to show it.")]


def show_data(table: Table, facts: Any, output: Output, *, as_json: bool = False) -> None:
    """Show data in the form that was asked for.

    Args:
        table: the data for people; its plain texts are those of CSV as well.
        facts: the same for programs.
        output: the form.
        as_json: JSON is asked for in the other way.
    """
    if as_json or output is Output.JSON:
        print_json(facts)
    elif output is Output.CSV:
        csv.writer(sys.stdout, lineterminator="\n").writerows(_plain(table))
    else:
        print_table(table)


def print_table(table: Table) -> None:
    """Print a table so that it can be read where it goes."""
    console = stdout()
    if not console.is_terminal:
        _print_lines(_plain(table))
    elif console.width < _NARROW and _natural_width(table) > console.width:
        _print_blocks(_plain(table))
    else:
        console.print(table)


def _natural_width(table: Table) -> int:
    console = stdout()
    return console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum


def _plain(table: Table) -> list[list[str]]:
    """Give header and rows as plain texts, each on one line."""
    from rich.text import Text

    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [["; ".join(Text.from_markup(cell).plain.split("\n")) for cell in row] for row in zip(*columns, strict=True)]


def _print_lines(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_blocks(rows: list[list[str]]) -> None:
    header, *others = rows
    width = max(map(len, header))
    for row in others:
        for name, cell in zip(header, row, strict=True):
            if cell:
                typer.echo(f"{name:{width}}  {cell}".strip())
        typer.echo("")
