"""Pages for users of other servers: what they name of ours exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ovmstrio.cli.config_reference import KEYS
from ovmstrio.cli.main import COMMANDS
from ovmstrio.server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
OPTIONS = {
    *ServerSettings.model_fields,
    *(each.replace("-", "_") for each in re.findall(r"--([\w-]+)", (ROOT / "docs" / "cli.md").read_text())),
}
OF_OTHER_PROGRAMS = {"weight_format", "device", "model"}
"""Options of optimum-cli and docker."""


def _own_cells(page: Path) -> str:
    """Return what follows the first column of the page's tables."""
    rows = [line.split("|")[2:] for line in page.read_text().splitlines() if line.startswith("| ")]
    return "\n".join(" ".join(row) for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_of_this_server_exist(page: Path) -> None:
    named = {
        each.replace("-", "_").removeprefix("no_") for each in re.findall(r"(?<![\w-])--(\w[\w-]*)", _own_cells(page))
    }
    assert named - OF_OTHER_PROGRAMS <= OPTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    found = re.findall(r"(?:^ {4}|`)ovms ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert {name for name in found if not name.startswith("-")} <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lists_and_nested_keys_of_the_configuration_exist(page: Path) -> None:
    keys = {key.partition(".")[2] if key.partition(".")[0].endswith("_list") else key for key in KEYS}
    named = set(re.findall(r"`((?:batching|placement|shape_buckets|tls|breaker)\.\w+)`", _own_cells(page)))
    assert named <= keys


def test_every_server_has_a_page() -> None:
    expected = "kserve mlserver nucleus ollama ovms paddle_serving tensorflow_serving triton vllm"
    assert [page.stem for page in PAGES] == expected.split()
