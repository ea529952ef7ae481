"""The catalogue of handlers: each is a project that can be served as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio_samples.catalog import HANDLERS, ProjectSample

README = HANDLERS[0].folder.parent / "README.md"


@pytest.mark.parametrize("sample", HANDLERS, ids=lambda sample: sample.name)
def test_a_listed_handler_is_a_project(sample: ProjectSample) -> None:
    """Without a warning unless something comes first, with a client, and a README that says how to serve it."""
    project, warnings = read_project(sample.folder)
    assert not warnings or sample.first
    assert project.name == sample.name
    assert (sample.folder / "client.py").is_file()
    told = (sample.folder / "README.md").read_text(encoding="utf-8")
    where = Path("models" if sample.first else "samples/ovmstrio_samples") / sample.name
    assert all(command in told for command in sample.commands(where))
    assert f"[{sample.name}]({sample.name}/README.md)" in README.read_text(encoding="utf-8")
