"""The two consoles of the command line: results go to standard output, messages to standard error."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

import typer

from ovmstrio.cli.exits import EX_FAILED, EX_INTERRUPTED, EX_USAGE
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
    "data_table",
    "echo",
    "escaping_console",
    "exit_on_error",
    "fail",
    "messages_are_rich",
    "print_json",
    "print_message",
    "print_result",
    "resolve_file",
    "stderr",
    "stdout",
]


@cache
def stdout() -> Console:
    """Return the console for results."""
    return escaping_console()


@cache
def stderr() -> Console:
    """Return the console for messages."""
    return escaping_console(stderr=True)


def messages_are_rich() -> bool:
    """Return whether messages go to a terminal or to a reader of colours, by rich's rules, without importing it."""
    compatible, forced = os.environ.get("TTY_COMPATIBLE"), os.environ.get("FORCE_COLOR")
    if compatible in {"0", "1"}:
        return compatible == "1"
    return sys.stderr.isatty() if forced is None else bool(forced)


def escaping_console(**options: Any) -> Console:
    """Return a console with these options of rich, which escapes control characters."""
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
    """Print a text with its control characters escaped; not through rich, which wraps lines."""
    typer.echo(escape_controls(text, keep="\n\t"), nl=nl, file=file)


def print_result(markup: str) -> None:
    """Print a line of a result without wrapping it."""
    stdout().print(markup, highlight=False, soft_wrap=True)


def print_message(text: str, style: str = "dim") -> None:
    """Print a message to standard error, without markup."""
    stderr().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a result as JSON; not through rich, which is slow for long texts."""
    import json

    typer.echo(json.dumps(value, indent=2))


def data_table(*columns: str, justify: Literal["left", "right"] = "left") -> Table:
    """Return a table with these columns, whose cells wrap instead of being truncated."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold", justify=justify)
    return table


def resolve_file(path: Path, default_name: str) -> Path:
    """Return the path, or the file ``default_name`` in a directory; exit if there is no such file."""
    file = path / default_name if path.is_dir() else path
    if not file.is_file():
        fail(f"{file}: no such file; expected a {default_name}, or its directory", EX_USAGE)
    return file


@contextmanager
def exit_on_error(code: int, *errors: type[Exception]) -> Iterator[None]:
    """Exit with ``code`` and the error's text if the block raises one of these errors."""
    try:
        yield
    except errors as error:
        fail(str(error), code)


def fail(message: str, code: int = EX_FAILED) -> NoReturn:
    """Print an error message, and exit with ``code``."""
    from rich.markup import escape

    stderr().print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)
