"""Generator of ``docs/openai_fields.md`` from the tables of request fields.

``python -m ovmstrio.cli.field_reference FILE`` writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ovmstrio.protocols.openai.known_fields import ENDPOINT_FIELDS, IGNORED_REASONS, KnownFields

_HEAD: Final = """# Fields of OpenAI's API

This page says what happens with each field of a request, for all fields of OpenAI's and vLLM's APIs. A field either
works, has no effect on the answer, or is refused; the server ignores no field that could change the answer.

    $ curl http://localhost:8000/v3/chat/completions \\
        -d '{"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_token": 5}'
    {"error": {"message": "Unknown parameter: 'max_token'; did you mean 'max_tokens'?", "type": "invalid_request_error",
     "param": "max_token", "code": "unknown_parameter"}}

| result | meaning |
|---|---|
| works | the pages named below describe the values |
| no effect | the server checks the type of the value; the answer does not depend on it |
| refused | status 400 with the reason and the code `unsupported_parameter` |
| not listed | status 400 with the closest known name and the code `unknown_parameter` |

[openai.md](openai.md#fields), [responses.md](responses.md), [embeddings.md](embeddings.md), [speech.md](speech.md) and
[images.md](images.md) describe the values of fields that work.

A null value always counts as absent. A refused field may have the value that the tables show, or else a value that
means "off": `false`, 0, an empty text, list or object. `--openai-errors ovms` ignores fields that are not listed, as
OVMS does, and so do text models among the nodes of a graph, because such fields may be meant for other nodes.

Messages with `function_call`, `audio`, `prefix` or `partial` are refused, too; use `tool_calls` and
`continue_final_message`. Other additional fields of messages, which clients copy from answers, have no effect.
"""
_TEXT: Final = ("/chat/completions", "/completions", "/responses")
_MAX_NAMES_CHARACTERS: Final = 150


class _Row(NamedTuple):
    """Result and reason of a field, and its name."""

    result: str
    reason: str
    name: str


def reference() -> str:
    """Write the page."""
    rows = {path: set(_rows(fields)) for path, fields in ENDPOINT_FIELDS.items()}
    common = set.intersection(*(rows[path] for path in _TEXT))
    parts = [_HEAD, *_section("All endpoints that generate text", common)]
    titles: dict[int, list[str]] = {}
    for path, fields in ENDPOINT_FIELDS.items():
        titles.setdefault(id(fields), []).append(path)
    for path, *others in titles.values():
        parts += _section(" and ".join([path, *others]), rows[path] - common if path in _TEXT else rows[path])
    return "".join(parts)


def _rows(known: KnownFields) -> Iterator[_Row]:
    yield from (_Row("works", known.limits.get(name, ""), name) for name in known.used)
    yield from (_Row("no effect", IGNORED_REASONS[name], name) for name in known.ignored)
    for name, refused in known.refused.items():
        accepted = "" if refused.neutral is None else f", except `{json.dumps(refused.neutral)}`"
        yield _Row(f"refused{accepted}", refused.reason, name)


def _section(title: str, rows: Iterable[_Row]) -> Iterator[str]:
    yield f"\n## {title}\n\n| result | fields | reason |\n|---|---|---|\n"
    names: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: (row.result != "works", row)):
        lines = names.setdefault((row.result, row.reason), [""])
        quoted = f"`{row.name}`"
        if lines[-1] and len(lines[-1]) + len(quoted) > _MAX_NAMES_CHARACTERS:
            lines.append("")
        lines[-1] += f", {quoted}" if lines[-1] else quoted
    for (result, reason), lines in names.items():
        yield from (f"| {result} | {line} | {reason} |\n" for line in lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
