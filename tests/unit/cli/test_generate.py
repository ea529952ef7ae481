from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.support.commands import run_command
from tests.support.project_files import PYTHON, write

run = partial(run_command, "generate")


@pytest.fixture(autouse=True)
def _folder(command_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command_folder / "here").mkdir()
    monkeypatch.chdir("here")


def test_the_dockerfile_is_written_here() -> None:
    """The expanded project stands between rulers, then a line for the file, then how to build."""
    write(Path("iris"), requirements__txt="numpy\n")
    result = run("iris/nucleus.yaml")
    assert result.exit_code == 0, result.output
    first, expanded, last = result.stdout.split("-" * 80 + "\n")
    assert (first, last) == ("", "✓ generated nucleus.Dockerfile\n")
    assert yaml.safe_load(expanded)["serve_port"] == 8080
    assert result.stderr == f"build the image with: docker build -f nucleus.Dockerfile -t iris {Path.cwd()}\n"
    text = Path("nucleus.Dockerfile").read_text()
    assert 'COPY ["iris/requirements.txt", "/src/project/requirements.txt"]' in text
    assert f"ovmstrio[handlers]=={version('ovmstrio')}" in text


def test_the_project_may_lie_anywhere(tmp_path: Path) -> None:
    """An image of one that is not below the output is built from its own folder."""
    project = write(tmp_path / "elsewhere", requirements__txt="numpy\n")
    result = run(str(project), "--output", "made/here")
    assert result.exit_code == 0, result.output
    assert 'COPY ["requirements.txt", "/src/project/requirements.txt"]' in Path(
        "made/here/nucleus.Dockerfile"
    ).read_text("utf-8")
    assert result.stderr.endswith(f"-f made/here/nucleus.Dockerfile -t elsewhere {project}\n")


def test_the_project_here_needs_no_name() -> None:
    """As with the original command."""
    write(Path())
    assert run().exit_code == 0
    assert 'COPY ["./", "/src/project/"]' in Path("nucleus.Dockerfile").read_text()


def test_sources_of_the_server_are_a_build_context() -> None:
    """The command line says so."""
    write(Path(), f"{PYTHON}use_local_cortex_libs: true\n")
    assert "--build-context ovmstrio=SOURCES" in run().stderr


def test_sources_that_are_none_are_one_clear_line(tmp_path: Path) -> None:
    """Nothing is written."""
    write(Path("iris"))
    result = run("iris", "--from-source", str(tmp_path))
    assert result.exit_code == 1
    assert "there is no pyproject.toml" in result.stderr
    assert not Path("nucleus.Dockerfile").exists()


def test_warnings_are_shown_and_do_no_harm() -> None:
    """The file is written all the same."""
    write(Path(), f"{PYTHON}processs: 2\n")
    result = run()
    assert result.exit_code == 0
    assert "did you mean 'processes'?" in result.stdout
    assert Path("nucleus.Dockerfile").is_file()


def test_a_project_with_mistakes_is_not_packed() -> None:
    """All are shown as with any configuration, and nothing is written."""
    write(Path(), "type: pithon\npath: nothing.py\n")
    result = run()
    assert result.exit_code == 1
    assert "error  nucleus.yaml:1  type" in result.stdout
    assert "error  nucleus.yaml:2  path" in result.stdout
    assert result.stdout.endswith("not ok: 2 errors and 0 warnings in 1 file\n")
    assert not Path("nucleus.Dockerfile").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_line() -> None:
    """Such as one that is a file."""
    write(Path())
    Path("file").touch()
    result = run("--output", "file")
    assert result.exit_code == 1
    assert result.stderr == "error: file/nucleus.Dockerfile cannot be written: File exists\n"
