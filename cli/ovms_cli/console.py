"""The two consoles of the command line: answers go to standard output, everything for people to standard error."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

import typer

from ovms_cli.exits import EX_FAILED, EX_INTERRUPTED, EX_USAGE
from ovmstrio.util.truncation import escape_controls

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table

__all__ = [
    "EX_INTERRUPTED",
    "EX_USAGE",
    "broken_pipe_ends",
    "data_table",
    "echo",
    "ending_with",
    "escaping_console",
    "fail",
    "file_of",
    "note",
    "print_json",
    "say",
    "stderr",
    "stdout",
]


@cache
def stdout() -> Console:
    """Return the console for answers."""
    return escaping_console()


@cache
def stderr() -> Console:
    """Return the console for messages."""
    return escaping_console(stderr=True)


def escaping_console(**options: Any) -> Console:
    """Return a console with these options of rich's, which shows control characters instead of writing them."""
    return _console_class()(emoji=False, **options)


@cache
def _console_class() -> type[Console]:
    from rich.console import Console

    class EscapingConsole(Console):
        """A console that escapes control characters: names and errors come from servers, clients and files."""

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            """Render into segments; those that control the cursor are rich's own."""
            for segment in super().render(renderable, options):
                text = segment.text if segment.control else escape_controls(segment.text, keep="\n")
                yield segment if text is segment.text else segment._replace(text=text)

    return EscapingConsole


def echo(text: str, *, nl: bool = True, file: IO[str] | None = None) -> None:
    """Print a text that is for people, with its control characters escaped; not through rich, which breaks lines."""
    typer.echo(escape_controls(text, keep="\n\t"), nl=nl, file=file)


def say(markup: str) -> None:
    """Print a line of an answer, as long as it is."""
    stdout().print(markup, highlight=False, soft_wrap=True)


def note(text: str, style: str = "dim") -> None:
    """Print a text as it is for whoever looks on."""
    stderr().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print an answer for programs; not through rich, which would take long over a long one."""
    import json

    typer.echo(json.dumps(value, indent=2))


def data_table(*columns: str, justify: Literal["left", "right"] = "left") -> Table:
    """Give a table of these columns, whose cells are never cut off."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold", justify=justify)
    return table


@contextmanager
def broken_pipe_ends() -> Iterator[None]:
    """End the command with 1 and without a word when nobody reads its answer any more."""
    try:
        yield
    except BrokenPipeError:
        # Python would complain of the pipe once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


def file_of(path: Path, default_name: str) -> Path:
    """Give a file, or the one of a name in a directory; there being none ends the command."""
    file = path / default_name if path.is_dir() else path
    if not file.is_file():
        fail(f"{file}: no such file; give a {default_name}, or the directory that it is in", EX_USAGE)
    return file


@contextmanager
def ending_with(code: int, *errors: type[Exception]) -> Iterator[None]:
    """End the command with ``code`` where the block raises one of these errors, whose text says why."""
    try:
        yield
    except errors as error:
        fail(str(error), code)


def fail(message: str, code: int = EX_FAILED) -> NoReturn:
    """Say why the command failed, in one line or more, and end it with ``code``."""
    from rich.markup import escape

    stderr().print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)
