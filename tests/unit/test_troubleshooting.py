"""The page about problems quotes messages that the server has."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_CELLS = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
_ROWS = [message for cell in _CELLS for message in cell.strip("`").split("`, `")]


@cache
def _texts() -> str:
    """Return all texts of the server's code, one a line."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "ovmstrio").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_messages_are_found() -> None:
    assert len(_ROWS) >= 40


@pytest.mark.parametrize("message", _ROWS)
def test_the_server_has_each_message_of_the_page(message: str) -> None:
    for part in message.split("..."):
        assert part.strip() in _texts()
