"""Generator of the command line reference ``docs/cli.md``: the text of typer as plain Markdown, without HTML.

``python -m ovmstrio.cli.reference FILE`` writes it.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from typer.testing import CliRunner

_BOLD: Final = re.compile(r'<span style="font-weight: bold">(.*?)</span>', re.DOTALL)
_OTHER_SPANS: Final = re.compile(r"</?span[^>]*>")
_CODE: Final = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_TAG: Final = re.compile(r"<(?=[A-Za-z/!])")
_DEFAULT: Final = re.compile(r"\[default: \((.*)\)\]$", re.MULTILINE)
_SECTION: Final = re.compile(r"^#+ `([^`]+)`\n\n(.+?)(?:\.\s|\n\n)", re.MULTILINE | re.DOTALL)
_SHORTENED: Final = re.compile(r"\* `(.+)`: .*\.\.\.")


def reference() -> str:
    """Write the reference of all commands."""
    from typer.cli import app

    with TemporaryDirectory() as folder:
        file = Path(folder) / "cli.md"
        options = ["ovmstrio.cli.all_commands", "utils", "docs", "--name", "ovms", "--output", str(file)]
        done = CliRunner().invoke(app, options, catch_exceptions=False)
        if done.exit_code:
            raise RuntimeError(done.output)
        return cleaned(file.read_text(encoding="utf-8"))


def cleaned(text: str) -> str:
    """Convert HTML in Markdown: bold spans become Markdown, entities become characters."""
    text = _OTHER_SPANS.sub("", _BOLD.sub(r"**\1**", text))
    text = _DEFAULT.sub(r"[default: \1]", _with_whole_summaries(html.unescape(text)))
    # Markdown viewers hide text outside of code that looks like a tag.
    parts = _CODE.split(text)
    return "".join(part if number % 2 else _TAG.sub(r"\<", part) for number, part in enumerate(parts))


def _with_whole_summaries(text: str) -> str:
    """Replace shortened summaries in lists of commands by the first sentence of the command's section."""
    sentences = {name: " ".join(sentence.split()) for name, sentence in _SECTION.findall(text)}
    lines, section = [], ""
    for line in text.split("\n"):
        if line.startswith("#"):
            section = line.strip("#` ")
        shortened = _SHORTENED.fullmatch(line)
        name = "" if shortened is None else shortened[1]
        sentence = sentences.get(f"{section} {name}")
        lines.append(f"* `{name}`: {sentence.rstrip('.')}." if sentence else line)
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
