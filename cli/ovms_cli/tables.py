"""The one way in which commands show data: as a table for people, as CSV or as JSON for programs.

On a terminal a table is as wide as it; below sixty columns each row is a block of lines.  In a pipe every row is one
line, however long, so that names stay whole for ``grep`` and ``awk``.  A command that shows data takes ``--output``,
and ``--json`` as a short form of it.
"""

from __future__ import annotations

import csv
import io
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovms_cli.console import echo, print_json, stdout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

_NARROW: Final = 60
_WIDEST: Final = 10_000


class Output(StrEnum):
    """How data is shown."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


OutputOption = Annotated[Output, typer.Option("--output", help="How to show it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as --output json.")]


def chosen(output: Output, *, as_json: bool) -> Output:
    """Give the form that is asked for in either way."""
    return Output.JSON if as_json else output


def show_data(table: Table, facts: Any, output: Output, *, as_json: bool = False) -> None:
    """Show data in the form that was asked for.

    Args:
        table: the data for people; its plain texts are those of CSV as well.
        facts: the same for programs.
        output: the form.
        as_json: JSON is asked for in the other way.
    """
    form = chosen(output, as_json=as_json)
    if form is Output.JSON:
        print_json(facts)
    elif form is Output.CSV:
        print_csv(plain_rows(table))
    else:
        print_table(table)


def print_csv(rows: Iterable[Sequence[object]]) -> None:
    """Print rows, the first of which names the columns."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    # Programs get the values as they are.
    (echo if sys.stdout.isatty() else typer.echo)(out.getvalue(), nl=False)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table so that it can be read where it goes, which is standard output by default."""
    console = console or stdout()
    # Not through rich, which would break lines where nobody's window ends.
    if not console.is_terminal:
        echo(_lines(plain_rows(table)), file=console.file)
    else:
        shown = fitted(table, console)
        is_text = isinstance(shown, str)
        console.print(shown, soft_wrap=is_text, markup=not is_text, highlight=False)


def fitted(table: Table, console: Console) -> RenderableType:
    """Give a table as it can be read on a terminal: a narrow one gets a text with a block for each row."""
    if console.width >= _NARROW:
        return table
    natural = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    return table if natural <= console.width else _blocks(plain_rows(table))


def plain_rows(table: Table) -> list[list[str]]:
    """Give header and rows as plain texts, each on one line."""
    columns = [[str(column.header), *map(_plain, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _plain(cell: RenderableType) -> str:
    from rich.text import Text

    text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
    return "; ".join(text.plain.split("\n"))


def _lines(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _blocks(rows: list[list[str]]) -> str:
    header, *others = rows
    width = max(map(len, header))
    blocks = []
    for row in others:
        named = [(name, cell) for name, cell in zip(header, row, strict=True) if cell]
        blocks.append("".join(f"{name:{width}}  {cell}".strip() + "\n" for name, cell in named))
    return "\n".join(blocks)
