"""``ovms migrate triton``: write a ``config.json`` from a Triton model repository, with a report of differences."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import EX_USAGE, exit_on_error, fail, print_json, print_result
from ovmstrio.cli.problems import count, safe, show_problems
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen, print_csv

if TYPE_CHECKING:
    from ovmstrio.cli.triton_conversion import Conversion, Conversions

_CONFIG: Final = "config.json"
_LINKS: Final = "models"
"""Folder of links, next to the configuration."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Convert the configuration of another server.")
    group.callback()(_group)
    group.command()(triton)
    app.add_typer(group, name="migrate")


def _group() -> None:
    """Convert the configuration of another server."""


def triton(
    repository: Annotated[
        Path,
        typer.Argument(
            help="Model repository of Triton; nothing is written into it.", show_default=False, metavar="REPO"
        ),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", metavar="FILE", help="File to write, or its folder; the folder models next to it has links."
        ),
    ] = Path(_CONFIG),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Write a config.json from the config.pbtxt files of a Triton model repository, and report what differs.

    Models of the ONNX Runtime, OpenVINO and TensorFlow backends and ensembles are converted. Exit code 1 if a
    config.pbtxt is invalid, or nothing can be converted; nothing is written then.
    """
    from ovmstrio.cli.triton_config import CONFIG, read_repository
    from ovmstrio.cli.triton_conversion import convert
    from ovmstrio.telemetry.logs import configure_logs

    configure_logs(level="ERROR")  # the report has what the search for model files would log
    file = output if output.suffix == ".json" and not output.is_dir() else output / _CONFIG
    if not repository.is_dir():
        fail(f"{repository}: no such folder; expected a model repository of Triton", EX_USAGE)
    if (repository / CONFIG).is_file():
        fail(f"{repository} is a model; expected its repository, such as {repository.absolute().parent}", EX_USAGE)
    if file.resolve().is_relative_to(repository.resolve()):
        fail(f"--output: {file} is inside of {repository}; expected another folder", EX_USAGE)
    if file.exists() and not force:
        fail(f"{file} exists already; overwrite it with --force", EX_USAGE)
    with exit_on_error(1, OSError):
        found = convert(read_repository(repository))
        is_written = bool(found.converted) and not found.errors
        if is_written:
            _write(file, found)
    facts = _facts(found, file if is_written else None)
    form = chosen(form, as_json=as_json)
    if form is Output.JSON:
        print_json(facts)
    elif form is Output.CSV:
        print_csv(_rows(found))
    else:
        _show(found, repository, file if is_written else None)
    raise typer.Exit(0 if is_written else 1)


def _write(file: Path, found: Conversions) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = file.parent.resolve()
    for conversion in found.converted:
        for path, target in conversion.links.items():
            _link(folder / _LINKS / path, target.resolve())
    text = json.dumps(found.config(partial(_base_path, folder)), indent=2, ensure_ascii=False)
    partial_file = file.with_name(f".{file.name}.{os.getpid()}")
    partial_file.write_text(text + "\n", encoding="utf-8")
    partial_file.replace(file)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    path.symlink_to(target)


def _base_path(folder: Path, conversion: Conversion) -> str:
    """Return the path of a model: relative if it is below the configuration's folder."""
    if conversion.links:
        return f"{_LINKS}/{conversion.model.name}"
    path = conversion.model.folder.resolve()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _facts(found: Conversions, file: Path | None) -> dict[str, Any]:
    return {
        "ok": file is not None,
        "output": None if file is None else str(file),
        "errors": [asdict(each) for each in found.errors],
        "models": [
            {
                "name": each.model.name,
                "backend": each.model.backend,
                "status": each.status,
                "reason": None if each.reason is None else asdict(each.reason),
                "notes": [asdict(note) for note in each.notes],
            }
            for each in found.models.values()
        ],
    }


def _rows(found: Conversions) -> list[list[Any]]:
    """Return the names of the columns, then a row for each error, each note and each model without one."""
    rows: list[list[Any]] = [["model", "backend", "result", "file", "line", "path", "message", "suggestion"]]
    reports = [(Path(each.file).parent.name, "", "invalid", [each]) for each in found.errors]
    for each in found.models.values():
        problems = [each.reason] if each.reason is not None else each.notes
        reports.append((each.model.name, each.model.backend, each.status, problems))
    for *first, problems in reports:
        rows += [[*first, at.file, at.line, at.path, at.message, at.suggestion] for at in problems]
        rows += [] if problems else [[*first, "", "", "", "", ""]]
    return rows


def _show(found: Conversions, repository: Path, file: Path | None) -> None:
    show_problems(sorted(found.errors, key=lambda problem: (problem.file, problem.line or 0)))
    for each in found.models.values():
        colour = "red" if each.reason is not None else "yellow" if each.notes else "green"
        print_result(f"[bold]{safe(each.model.name)}[/]  {safe(each.model.backend or '?')}  [{colour}]{each.status}[/]")
        for row in [each.reason] if each.reason is not None else each.notes:
            where = os.path.relpath(row.file, repository) + (f":{row.line}" if row.line else "")
            field = f"[cyan]{safe(row.path)}[/]: " if row.path else ""
            advice = f"; {row.suggestion}" if row.suggestion else ""
            print_result(f"    {safe(where)}  {field}{safe(row.message + advice)}")
    if file is not None:
        done = len(found.converted)
        others = len(found.models) - done
        print_result(
            f"[bold green]ok[/]: {count(done, 'model')} converted, {others} not converted, in {safe(str(file))}"
        )
        print_result(f"next: ovms check {safe(str(file))}")
    elif found.errors:
        print_result(f"[bold red]not ok[/]: {count(len(found.errors), 'error')}, nothing is written")
    else:
        print_result(f"[bold red]not ok[/]: no model of {safe(str(repository))} can be converted, nothing is written")
