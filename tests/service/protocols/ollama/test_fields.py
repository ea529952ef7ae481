"""The results of fields that docs/ollama.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from ovmstrio.cli.field_tables import TABLES, with_tables
from tests.service.protocols.openai.servers import CHAT, WORDS
from tests.unit.protocols.servers import Serving

_PAGE: Final = Path(__file__).parents[4] / "docs" / "ollama.md"
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/api/chat": {"model": CHAT, "messages": [{"role": "user", "content": "a"}], "stream": False},
    "/api/generate": {"model": CHAT, "prompt": "a", "stream": False},
    "/api/embed": {"model": WORDS, "input": "a"},
    "/api/embeddings": {"model": WORDS, "prompt": "a"},
}
_TABLES: Final = TABLES[_PAGE.name]
_VALUES: Final[tuple[Any, ...]] = ([[5.5]], 5.5, {"x": 5.5}, "x", 2, True, {})
"""Values of all types; of a field that the server reads or checks, at least one is invalid."""
_UNCHECKED: Final = frozenset({"model", "messages", "prompt"})
"""Fields that name the model, or whose other values are answered without a prompt or with another error."""


def _listed(section: str) -> dict[str, dict[str, str]]:
    """Return the fields of a section by result, each with the value that is accepted though it is refused."""
    text = _PAGE.read_text().partition(f"\n### {section}\n")[2].partition("\n### ")[0]
    found: dict[str, dict[str, str]] = {}
    for result, fields in re.findall(r"^\| (works|no effect|refused[^|]*) \| ([^|]*) \|", text, re.MULTILINE):
        accepted = result.partition("except `")[2].removesuffix("`")
        names = dict.fromkeys(re.findall(r"`(\w+)`", fields), accepted or "false")
        found.setdefault(result.partition(",")[0], {}).update(names)
    return found


def test_the_tables_are_the_generated_ones() -> None:
    text = _PAGE.read_text()
    assert with_tables(_PAGE.name, text) == text
    for section, (known, _) in _TABLES.items():
        assert sum(map(len, _listed(section).values())) == sum(map(len, known[:3])), section


@pytest.mark.parametrize("section", _TABLES)
async def test_each_listed_field_has_its_result(serving: Serving, section: str) -> None:
    async def ask(field: str, value: Any) -> tuple[int, str]:
        given = {field: value} if section != "options" else {"options": {field: value}}
        path = section if section in _BODIES else "/api/chat"
        answer = await serving.post(path, json=_BODIES[path] | given)
        return answer.status_code, json.loads(answer.text.splitlines()[-1]).get("error", "")

    found = {}
    for result, fields in _listed(section).items():
        for field, accepted in fields.items():
            if field in _UNCHECKED:
                continue
            answers = [await ask(field, value) for value in _VALUES]
            errors = [error for status, error in answers if status == 400]
            if result == "refused":
                status, _ = await ask(field, json.loads(accepted))
                has_result = status == 200 and any(f"{field} is not supported: " in error for error in errors)
            elif result == "no effect":
                has_result = (200, "") in answers and bool(errors)
            else:
                has_result = bool(errors)
            if not has_result or any("Unknown parameter" in error for error in errors if field != "options"):
                found[field] = answers
    assert found == {}
