"""Values of environment variables in a build of a handler project."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.runtimes.handlers.config.dockerfile import make_dockerfile
from ovmstrio.runtimes.handlers.config.project_file import read_project
from tests.support.examples import examples
from tests.support.projects import write


def _install(dockerfile: str) -> list[str]:
    """Give the commands of the step that installs what the project wants."""
    step = re.search(r"^RUN set -e; \\\n((?:.*\\\n)*.*)", dockerfile, re.MULTILINE)
    return [] if step is None else [line.removesuffix("; \\").strip() for line in step[1].split("\n")]


@settings(max_examples=examples(40), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12))
def test_any_value_of_env_reaches_the_build(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    """On one line of the Dockerfile, as bash gives it back."""
    folder = tmp_path_factory.mktemp("project")
    project, _ = read_project(write(folder / "iris", requirements__txt=""))
    text = make_dockerfile(project.model_copy(update={"env": {"A": value}}), folder, "1")
    export = _install(text)[0]
    assert "<" not in export
    script = f'{export}; printf %s "$A"'
    done = subprocess.run(["bash", "-c", script], env={"LC_ALL": "C.UTF-8"}, capture_output=True, check=True)
    assert done.stdout.decode() == value
