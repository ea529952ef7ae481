"""Generator of the command line reference ``docs/cli.md`` from the declarations of the commands.

``python -m ovmstrio.cli.reference FILE`` writes it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from ovmstrio.cli.commands import Group
from ovmstrio.cli.help_text import paragraphs, parameter_entries, parameter_entry, usage
from ovmstrio.cli.main import PANELS, command_line

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD: Final = """# Command line

All commands of `ovms` with all their options. `ovms COMMAND --help` prints the same text; `ovms serve --help` shows the
common options only, and `ovms help TOPIC` those of one group. Option names accept `_` in place of `-`.
"""
_TAG: Final = re.compile(r"<(?=[A-Za-z/!])")


def reference() -> str:
    """Return the reference of all commands."""
    root: Any = typer.main.get_command(command_line())
    with typer.Context(root, info_name="ovms") as ctx:
        parts = [_HEAD]
        for panel, names in PANELS.items():
            parts.append(f"## {panel}")
            for name in names:
                parts += _sections(root.get_command(ctx, name), f"ovms {name}")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _sections(command: Any, path: str) -> Iterator[str]:
    """Yield the parts of a command and its sub-commands."""
    with typer.Context(command, info_name=path) as ctx:
        params = command.get_params(ctx)
        is_group = isinstance(command, Group)
        yield f"### `{path}`"
        yield f"```console\n$ {usage(path, params, has_commands=is_group)}\n```"
        yield from map(_escaped, paragraphs(command.help or ""))
        if is_group:
            for name in command.list_commands(ctx):
                yield from _sections(command.get_command(ctx, name), f"{path} {name}")
            return
    params = [each for each in params if each.name != "help"]
    entries = [*parameter_entries(params), *(parameter_entry(each) for each in params if each.hidden)]
    for title in dict.fromkeys(each.group for each in entries):
        yield f"**{title}**"
        yield "\n".join(f"* `{each.name}`: {_escaped(each.help)}" for each in entries if each.group == title)


def _escaped(text: str) -> str:
    """Escape what Markdown viewers take for tags; no-break spaces become spaces."""
    return _TAG.sub(r"\<", text.replace("\u00a0", " "))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
