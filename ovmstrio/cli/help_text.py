"""Layout of help: paragraphs, and options in groups, at any width and for every supported version of typer.

Reads only public attributes of commands and parameters, so no version of typer lays them out differently. Does not
import rich, which takes longer than the rest of the command.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OPTIONS: Final = "Options"
ARGUMENTS: Final = "Arguments"
DEPRECATED: Final = "Deprecated"
_NARROWEST: Final = 40
_WIDEST: Final = 120
_INDENT: Final = "  "
_NO_BREAK: Final = "\u00a0"
"""Space at which no line is wrapped."""
_SHORT_FACT: Final = 25


@dataclass(frozen=True, slots=True)
class Entry:
    """Row of help: an option, an argument or a command, with the title of its group."""

    group: str
    name: str
    help: str


# -- Parameters --------------------------------------------------------------------------------------------------------


def parameter_entries(params: Iterable[Any]) -> list[Entry]:
    """Return the rows of the parameters that are not hidden, arguments first."""
    shown = sorted((each for each in params if not each.hidden), key=lambda each: not _is_argument(each))
    return [parameter_entry(each) for each in shown]


def parameter_entry(param: Any, group: str = "", *, brief: bool = False) -> Entry:
    """Return the row of a parameter; a brief row has the first clause of the help text."""
    # The option --help is made by click, which has no groups.
    own = getattr(param, "rich_help_panel", None)
    text = param.help or ""
    if brief:
        text = text.partition(";")[0].partition(". ")[0].removesuffix(".") + "."
    if _is_argument(param):
        return Entry(group or own or ARGUMENTS, _argument(param), text)
    return Entry(group or own or OPTIONS, _option(param), " ".join([text, *_facts(param)]).strip())


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def usage(path: str, params: Iterable[Any], *, has_commands: bool = False) -> str:
    """Return the usage line of a command, without ``Usage:``."""
    arguments = [
        _argument(each) if each.required else f"[{_argument(each)}]"
        for each in params
        if _is_argument(each) and not each.hidden
    ]
    return " ".join([path, "[OPTIONS]", *arguments, *(["COMMAND ..."] if has_commands else [])])


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return f"{name}..." if param.nargs == -1 else str(name)


def _option(param: Any) -> str:
    """Return the names of an option and its metavar; names of an off switch that only repeat ``--no-`` are left out."""
    names = sorted(param.opts, key=len)
    off = [name for name in param.secondary_opts if param.default or _default(param) or not name.startswith("--no-")]
    shown = "/".join([", ".join(names), *off])
    return shown if param.is_flag else f"{shown} {param.metavar}{'...' if param.multiple else ''}"


def _facts(param: Any) -> list[str]:
    facts = []
    if getattr(param, "show_envvar", False) and param.envvar:
        facts.append(f"[env: {param.envvar}]")
    if param.required:
        facts.append("[required]")
    elif default := _default(param):
        facts.append(f"[default: {default}]")
    return [fact.replace(" ", _NO_BREAK) if len(fact) < _SHORT_FACT else fact for fact in facts]


def _default(param: Any) -> str:
    """Return the text of a default; empty if there is none or if it says nothing."""
    if isinstance(param.show_default, str):
        return param.show_default
    value = param.default
    if not param.show_default or callable(value) or value is None or value in (False, "", (), []):
        return ""
    if value is True:
        return "on"
    return f"{value:g}" if isinstance(value, float) else str(value.value if isinstance(value, Enum) else value)


# -- Layout ------------------------------------------------------------------------------------------------------------


def terminal_width() -> int:
    """Return the width of the terminal, 80 in a pipe."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))


def lay_out(usage_line: str, text: str, entries: Sequence[Entry], closing: str = "", *, width: int = 0) -> str:
    """Return the help of a command: usage, paragraphs, groups in the order of their first rows, closing paragraph."""
    width = width or terminal_width()
    parts = [_wrapped(f"Usage: {usage_line}", width, following=len("Usage: ") * " ")]
    parts += [_wrapped(paragraph, width) for paragraph in paragraphs(text)]
    for title in dict.fromkeys(entry.group for entry in entries):
        group = [entry for entry in entries if entry.group == title]
        column = _column(group, width)
        parts.append("\n".join([_bold(f"{title}:"), *(_row(entry, column, width) for entry in group)]))
    parts += [_wrapped(paragraph, width) for paragraph in paragraphs(closing)]
    return "\n\n".join(parts)


def paragraphs(text: str) -> list[str]:
    """Split a text into paragraphs without line breaks."""
    return [" ".join(part.split()) for part in text.replace("``", "").split("\n\n") if part.strip()]


def summary(text: str) -> str:
    """Return the first sentence of a help text."""
    first = paragraphs(text)[0] if text.strip() else ""
    return f"{first.partition('. ')[0].removesuffix('.')}."


def _column(entries: Sequence[Entry], width: int) -> int:
    """Return the column of the help texts: behind most names, and left of the middle."""
    fitting = [len(entry.name) for entry in entries if len(entry.name) + 4 <= width * 9 // 20]
    return max(fitting, default=len(_INDENT)) + 4


def _row(entry: Entry, column: int, width: int) -> str:
    wrapped = textwrap.wrap(entry.help, width - column, break_long_words=False, break_on_hyphens=False)
    lines = [line.replace(_NO_BREAK, " ") for line in wrapped]
    name = _INDENT + entry.name
    if len(name) + 2 <= column and lines:
        first = _INDENT + _bold(entry.name) + " " * (column - len(name)) + lines.pop(0)
    else:
        first = _INDENT + _bold(entry.name)
    return "\n".join([first, *(" " * column + line for line in lines)])


def _wrapped(text: str, width: int, following: str = "") -> str:
    return textwrap.fill(
        text, width, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def _bold(text: str) -> str:
    """Mark a text; ``typer.echo`` removes the mark in pipes."""
    return text if "NO_COLOR" in os.environ else typer.style(text, bold=True)
