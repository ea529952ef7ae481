"""``ovms handler``: write a Dockerfile for a handler project."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import echo, fail, print_message
from ovmstrio.cli.problems import conclude, show_problems

if TYPE_CHECKING:
    from ovmstrio.handlers.config.project_spec import ProjectSpec

_NAME: Final = "nucleus.Dockerfile"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Write the Dockerfile of a handler project.")
    group.callback()(_group)
    group.command()(dockerfile)
    app.add_typer(group, name="handler")


def _group() -> None:
    """Write the Dockerfile of a handler project."""


def dockerfile(
    config: Annotated[Path, typer.Argument(metavar="PROJECT", help="File nucleus.yaml, or its directory.")] = Path(
        "nucleus.yaml"
    ),
    *,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Directory of the written file.")] = Path(),
    from_source: Annotated[
        Path | None,
        typer.Option(
            "--from-source", metavar="DIR", help="Source directory of the server, to build a wheel for the image."
        ),
    ] = None,
) -> None:
    """Write a Dockerfile for a handler project and this server. Exit code 1 if the project has an error."""
    from importlib.metadata import version

    from ovmstrio.handlers.config.dockerfile import LOCAL_SERVER, make_dockerfile
    from ovmstrio.handlers.config.project_file import to_yaml

    project = _read(config)
    context = output.resolve()
    if not project.directory.is_relative_to(context):
        context = project.directory
    ruler = "-" * 80
    echo(f"{ruler}\n{to_yaml(project)}{ruler}")
    file = output / _NAME
    try:
        output.mkdir(parents=True, exist_ok=True)
        wheel = "" if from_source is None else _built(from_source, context)
        file.write_text(make_dockerfile(project, context, version("ovmstrio"), wheel), encoding="utf-8")
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}")
    echo(f"✓ generated {file}")
    is_context = project.image.use_local_cortex_libs and not wheel
    sources = f" --build-context {LOCAL_SERVER}=SOURCES" if is_context else ""
    print_message(f"build the image with: docker build -f {file}{sources} -t {project.name} {context}", style="")


def _built(source: Path, folder: Path) -> str:
    """Build a wheel of the server into a folder, and return the file name; exit if the build fails."""
    from tempfile import TemporaryDirectory

    if not (source / "pyproject.toml").is_file():
        fail(f"{source} is not a source directory of the server: there is no pyproject.toml")
    with TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, str(source)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - fixed command
        made = next(Path(scratch).glob("ovmstrio-*.whl"), None)
        if done.returncode or made is None:
            fail(f"cannot build a wheel of the server from {source}: {done.stderr.strip() or 'it is another package'}")
        shutil.copyfile(made, folder / made.name)
        return made.name


def _read(config: Path) -> ProjectSpec:
    """Read a project and show its problems; exit if one of them is an error."""
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.handlers.config.project_file import read_project

    try:
        project, warnings = read_project(config)
    except ConfigError as error:
        conclude(error.problems, "")
    show_problems(warnings)
    return project
