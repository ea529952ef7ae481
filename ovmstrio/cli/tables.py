"""Output of data by all commands: a table for people, CSV or JSON for programs.

On a terminal a table has the width of the terminal; below 60 columns each row is a block of lines. In a pipe every row
is one line, so that ``grep`` and ``awk`` find complete names. A command that shows data takes ``--format``, and
``--json`` as its short form; ``--output`` names a file.
"""

from __future__ import annotations

import csv
import io
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.console import echo, print_json, stdout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

_NARROW: Final = 60
_WIDEST: Final = 10_000


class Output(StrEnum):
    """Output format of data."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


FORMATS: Final = "|".join(Output)

FormatOption = Annotated[
    Output, typer.Option("--format", metavar=FORMATS, rich_help_panel="Output", help="Format of the output.")
]
JsonOption = Annotated[bool, typer.Option("--json", rich_help_panel="Output", help="The same as --format json.")]


def chosen(output: Output, *, as_json: bool) -> Output:
    """Return the form that ``--format`` or ``--json`` selects."""
    return Output.JSON if as_json else output


def show_data(table: Table, facts: Any, output: Output, *, as_json: bool = False) -> None:
    """Show data in the selected form.

    Args:
        table: the data for people; CSV contains its plain texts.
        facts: the data for JSON.
        output: the form.
        as_json: use JSON instead of ``output``.
    """
    form = chosen(output, as_json=as_json)
    if form is Output.JSON:
        print_json(facts)
    elif form is Output.CSV:
        print_csv(plain_rows(table))
    else:
        print_table(table)


def print_csv(rows: Iterable[Sequence[object]]) -> None:
    """Print rows; the first row contains the names of the columns."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    # Programs get unescaped values.
    (echo if sys.stdout.isatty() else typer.echo)(out.getvalue(), nl=False)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table in a form that suits the terminal or pipe; default: standard output."""
    console = console or stdout()
    # rich would wrap lines at the width of a terminal that a pipe does not have.
    if not console.is_terminal:
        echo(aligned(plain_rows(table)), file=console.file)
    else:
        shown = fitted(table, console)
        is_text = isinstance(shown, str)
        console.print(shown, soft_wrap=is_text, markup=not is_text, highlight=False)


def fitted(table: Table, console: Console) -> RenderableType:
    """Return the table for a terminal; for a narrow terminal, return a text with a block for each row."""
    if console.width >= _NARROW:
        return table
    natural = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    return table if natural <= console.width else _blocks(plain_rows(table))


def plain_rows(table: Table) -> list[list[str]]:
    """Return header and rows as plain texts without line breaks."""
    columns = [[str(column.header), *map(_plain, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _plain(cell: RenderableType) -> str:
    from rich.text import Text

    text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
    return "; ".join(text.plain.split("\n"))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a line for each row, in aligned columns."""
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
