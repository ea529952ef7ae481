"""Programs of the pages about clients and tests, run as printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.testing import serving
from tests.support import ir

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the models of the pages."""
    ir.save(ir.dummy(), tmp_path / "models", "plus")
    ir.save(ir.accumulator(), tmp_path / "models", "sums")
    entries = [
        {"name": "plus", "base_path": "models/plus"},
        {"name": "sums", "base_path": "models/sums", "stateful": True},
    ]
    (tmp_path / "config.json").write_text(json.dumps({"model_config_list": [{"config": each} for each in entries]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_page(page: str, *replacements: tuple[str, str]) -> dict[str, Any]:
    text = "\n".join(BLOCK.findall((DOCS / page).read_text()))
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text, page, "exec"), names)
    return names


def test_the_programs_of_the_client_page_print_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(folder / "config.json") as server:
        run_page(
            "python_client.md", ("grpc://localhost:9000", server.grpc), ("http://localhost:8000", server.rest)
        )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "[[1. 1. 1. 1. 1. 1. 1. 1. 1. 1.]] 1",
        "[[2. 2. 2. 2. 2. 2. 2. 2. 2. 2.]]",
        "[[0. 0.]]",
        "[[1. 1.]]",
        "[[3. 3.]]",
    ]


@pytest.mark.usefixtures("folder")
def test_the_tests_of_the_testing_page_pass() -> None:
    names = run_page("testing.md")
    names["test_one_is_added"]()
    names["test_an_idle_sequence_ends"]()
    trio.run(names["test_the_server_is_ready"])
