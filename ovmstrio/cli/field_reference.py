"""Generator of ``docs/openai_fields.md`` from the tables of request fields.

``python -m ovmstrio.cli.field_reference FILE`` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ovmstrio.cli.field_tables import field_rows, field_table
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


def reference() -> str:
    """Write the page."""
    rows = {path: set(field_rows(fields, _notes(fields))) for path, fields in ENDPOINT_FIELDS.items()}
    common = set.intersection(*(rows[path] for path in _TEXT))
    parts = [_HEAD, "\n## All endpoints that generate text\n\n", field_table(common)]
    titles: dict[int, list[str]] = {}
    for path, fields in ENDPOINT_FIELDS.items():
        titles.setdefault(id(fields), []).append(path)
    for path, *others in titles.values():
        own = rows[path] - common if path in _TEXT else rows[path]
        parts += [f"\n## {' and '.join([path, *others])}\n\n", field_table(own)]
    return "".join(parts)


def _notes(known: KnownFields) -> Mapping[str, str]:
    return {**known.limits, **{name: IGNORED_REASONS[name] for name in known.ignored}}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
