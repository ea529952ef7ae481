"""Generator of the tables of request fields in ``docs/anthropic.md`` and ``docs/ollama.md``.

``python -m ovmstrio.cli.field_tables docs`` replaces the table after each mark ``<!-- fields: NAME -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ovmstrio.protocols.anthropic import messages
from ovmstrio.protocols.ollama import api
from ovmstrio.protocols.ollama.chat import CHAT
from ovmstrio.protocols.ollama.embed import EMBED, EMBED_NOTES, EMBEDDINGS
from ovmstrio.protocols.ollama.generate import GENERATE
from ovmstrio.protocols.openai.known_fields import KnownFields

_EMBED: Final = {**api.NOTES, **EMBED_NOTES}
TABLES: Final[Mapping[str, Mapping[str, tuple[KnownFields, Mapping[str, str]]]]] = {
    "anthropic.md": {"/messages": (messages.MESSAGES, messages.NOTES)},
    "ollama.md": {
        "/api/chat": (CHAT, api.NOTES),
        "/api/generate": (GENERATE, api.NOTES),
        "/api/embed": (EMBED, _EMBED),
        "/api/embeddings": (EMBEDDINGS, _EMBED),
        "options": (api.OPTIONS, api.OPTION_NOTES),
    },
}
"""Tables by page and mark: fields, and notes on those that work or have no effect."""

_TABLE: Final = re.compile(r"(<!-- fields: (\S+) -->\n\n)(?:\|.*\n)*")
_ORDER: Final = ("works", "no effect", "refused")
_MAX_NAMES_CHARACTERS: Final = 150


class FieldRow(NamedTuple):
    """Result of a field, a note on it, and its name."""

    result: str
    note: str
    name: str


def with_tables(page: str, text: str) -> str:
    """Return the text of a page with its tables replaced."""
    return _TABLE.sub(lambda mark: mark[1] + field_table(field_rows(*TABLES[page][mark[2]])), text)


def field_table(rows: Iterable[FieldRow]) -> str:
    """Return a table with the fields of equal results and notes in a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: (_ORDER.index(row.result.partition(",")[0]), row)):
        lines = names.setdefault((row.result, row.note), [""])
        quoted = f"`{row.name}`"
        if len(lines[-1]) + len(quoted) > _MAX_NAMES_CHARACTERS:
            lines.append("")
        lines[-1] += f", {quoted}" if lines[-1] else quoted
    lines_of_table = (f"| {result} | {line} | {note} |\n" for (result, note), lines in names.items() for line in lines)
    return "".join(("| result | fields | note |\n|---|---|---|\n", *lines_of_table))


def field_rows(known: KnownFields, notes: Mapping[str, str]) -> Iterator[FieldRow]:
    """Yield the result of each field, with notes on those that work or have no effect."""
    yield from (FieldRow("works", notes.get(name, ""), name) for name in known.used)
    yield from (FieldRow("no effect", notes[name], name) for name in known.ignored)
    for name, refused in known.refused.items():
        neutral = refused.neutral if isinstance(refused.neutral, tuple) else (refused.neutral,)
        accepted = ", except " + " and ".join(f"`{json.dumps(each)}`" for each in neutral) if neutral != (None,) else ""
        yield FieldRow(f"refused{accepted}", refused.reason, name)


if __name__ == "__main__":
    for name in TABLES:
        file = Path(sys.argv[1], name)
        file.write_text(with_tables(name, file.read_text(encoding="utf-8")), encoding="utf-8")
