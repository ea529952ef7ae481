"""The two consoles of the command line: answers go to standard output, everything for people to standard error."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EX_INTERRUPTED", "EX_USAGE", "fail", "stderr", "stdout"]

EX_INTERRUPTED = 130
EX_USAGE = 64
"""The exit code of a wrong command line (sysexits.h), which OVMS uses too."""


@cache
def stdout() -> Console:
    """Give the console for answers."""
    from rich.console import Console

    return Console(emoji=False)


@cache
def stderr() -> Console:
    """Give the console for messages."""
    from rich.console import Console

    return Console(stderr=True, emoji=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """Say why the command failed, in one line or more, and end it with ``code``."""
    from rich.markup import escape

    stderr().print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)
