"""Plain language in docstrings, comments, documentation and help texts."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_facts import comments, source_facts

ROOT = Path(__file__).parents[2]

QUESTION_WORDS = {"What", "Where", "Whether", "Which", "How", "Who", "Whose", "When", "Why"}
INDIRECT_VERBS = {"Give", "Tell", "Have", "Say", "Let", "See", "Look", "Know"}
BANNED_WORDS = re.compile(
    r"\b(told|anew|whoever|somebody|nobody|beside|forsake|condemn|mend|spoil|hurry|the way out)\b", re.IGNORECASE
)
SOURCES = sorted(path for path in (ROOT / "ovmstrio").rglob("*.py") if "generated" not in path.parts)
TESTS = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
"""Files whose data strings are exempt, such as names of unknown models."""
SCRIPTS = sorted((ROOT / ".ci").iterdir())
"""Shell scripts."""


def _docstrings(path: Path) -> Iterator[tuple[set[str], int, str]]:
    """List the forbidden first words, the line and the text of each docstring."""
    for each in source_facts(path).docstrings:
        forbidden = QUESTION_WORDS
        if each.is_property:
            forbidden = QUESTION_WORDS - {"Whether", "Why"}
        elif each.is_function:
            forbidden = QUESTION_WORDS | INDIRECT_VERBS
        yield forbidden, each.line, each.text


def test_docstrings_begin_with_a_noun_or_an_imperative_verb() -> None:
    wrong = []
    for path in SOURCES + TESTS:
        for forbidden, line, text in _docstrings(path):
            first = re.split(r"[\s,.:]", text, maxsplit=1)[0]
            if first in forbidden:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {first}")
    assert not wrong


def test_docstrings_and_comments_use_no_banned_word() -> None:
    wrong = []
    for path in SOURCES + SCRIPTS:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := BANNED_WORDS.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {found[0]}")
    for path in TESTS:
        docstrings = ((each.line, each.text) for each in source_facts(path).docstrings)
        for number, text in (*docstrings, *comments(path)):
            if found := BANNED_WORDS.search(text):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {found[0]}")
    assert not wrong


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: page.name,
)
def test_pages_use_no_banned_word(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [f"{number}: {found[0]}" for number, line in lines if (found := BANNED_WORDS.search(line))] == []


_ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?: .*\n|\n)*)", re.MULTILINE)


def test_docstrings_name_parameters_attributes_and_errors_that_exist() -> None:
    """A parameter occurs in the code of its file; an attribute or error occurs in the code of some file."""
    code = {
        path: set(re.findall(r"\w+", re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL))) for path in SOURCES
    }
    anywhere = set().union(*code.values()) | set(dir(builtins)) | {"InferenceServerException"}
    wrong = []
    for path in SOURCES:
        for each in source_facts(path).docstrings:
            for section, entries in _SECTION.findall(f"{each.text}\n"):
                known = code[path] if section == "Args" else anywhere
                wrong += [
                    f"{path.relative_to(ROOT)}:{each.line}: {name}"
                    for name in _ENTRY.findall(entries)
                    if name not in known
                ]
    assert not wrong
