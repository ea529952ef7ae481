"""The catalogue of handlers: each is a project that can be served as it is."""

from __future__ import annotations

import pytest

from ovmstrio.handlers.config.project_file import read_project
from ovmstrio_samples.catalog import HANDLERS, HandlerSample

README = HANDLERS[0].folder.parent / "README.md"


@pytest.mark.parametrize("sample", HANDLERS, ids=lambda sample: sample.name)
def test_a_listed_handler_is_a_project(sample: HandlerSample) -> None:
    """Without a warning, with a README, and in the table of all samples."""
    project, warnings = read_project(sample.folder)
    assert not warnings
    assert project.name == sample.name
    assert (sample.folder / "README.md").is_file()
    assert f"[{sample.name}]({sample.name}/README.md)" in README.read_text(encoding="utf-8")
