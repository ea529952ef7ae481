"""The results of fields that docs/anthropic.md lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from ovmstrio.cli.field_tables import with_tables
from ovmstrio.protocols.anthropic.messages import MESSAGES
from tests.service.protocols.openai.servers import CHAT
from tests.unit.protocols.servers import Serving

_PAGE: Final = Path(__file__).parents[4] / "docs" / "anthropic.md"
_BODY: Final[dict[str, Any]] = {"model": CHAT, "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
_VALUES: Final[tuple[Any, ...]] = ([[5.5]], 5.5, {"x": 5.5}, "x", 1, True, {})
"""Values of all types; of a field that the server reads or checks, at least one is invalid."""


def _listed() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for result, fields in re.findall(r"^\| (works|no effect|refused) \| ([^|]*) \|", _PAGE.read_text(), re.MULTILINE):
        found.setdefault(result, []).extend(re.findall(r"`(\w+)`", fields))
    return found


def test_the_table_is_the_generated_one() -> None:
    text = _PAGE.read_text()
    assert with_tables(_PAGE.name, text) == text
    assert sum(map(len, _listed().values())) == sum(map(len, MESSAGES[:3]))


async def test_each_listed_field_has_its_result(serving: Serving) -> None:
    found = {}
    for result, fields in _listed().items():
        for field in fields:
            answers = [await serving.post("/v1/messages", json=_BODY | {field: value}) for value in _VALUES]
            messages = [each.json()["error"]["message"] for each in answers if each.status_code == 400]
            accepted = [each for each in answers if each.status_code == 200]
            if result == "refused":
                has_result = any(f"{field} is not supported: " in message for message in messages)
            elif result == "no effect":
                has_result = bool(accepted) and bool(messages)
            else:
                has_result = bool(messages) or field == "model"
            if not has_result or any("Unknown parameter" in message for message in messages):
                found[field] = messages
    assert found == {}
