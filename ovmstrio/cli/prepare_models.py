"""Conversion of one model or of a folder of models for ``ovms prepare``, and its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from ovmstrio.cli.console import EX_USAGE, exit_on_error, fail, print_message, print_result, stderr
from ovmstrio.cli.exits import EX_FAILED
from ovmstrio.cli.problems import count, safe
from ovmstrio.cli.progress import spinner
from ovmstrio.cli.tables import Output, print_table, show_data

if TYPE_CHECKING:
    from rich.table import Table

    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.inference.conversion import Conversion, Converted, ModelSource

    Outcome: TypeAlias = Converted | Path | Exception
    """Result of one model: converted, the folder of an existing version that was kept, or an error."""


def prepare_models(
    source: Path,
    repository: Path,
    name: str,
    version: int,
    wanted: Conversion,
    *,
    force: bool,
    form: Output,
) -> None:
    """Convert the model at a path, or each model of a folder, into the repository, and print the results.

    Ends the command with 1 if a model cannot be converted, after converting the other models of the folder.
    """
    from ovmstrio.core.errors import ServerError
    from ovmstrio.inference.conversion import find_models
    from ovmstrio.telemetry.logs import configure_logs

    configure_logs(level="ERROR")
    with exit_on_error(EX_FAILED, ServerError, OSError):
        found = find_models(source)
    if len(found) == 1:
        _prepare_one(found[0].path, repository, name or found[0].name, version, wanted, force=force, form=form)
    else:
        _refuse_for_several(source, len(found), name, wanted)
        _prepare_several(source, found, repository, version, wanted, force=force, form=form)


def _refuse_for_several(source: Path, number: int, name: str, wanted: Conversion) -> None:
    of_one = {"--name": name, "--state": wanted.state, "--input": wanted.inputs, "--quantize": wanted.calibration}
    given = [option for option, value in of_one.items() if value]
    if given:
        fail(
            f"{source} holds {number} models, but {' and '.join(given)} is for one model: give its path",
            EX_USAGE,
        )


def _prepare_one(
    source: Path, repository: Path, name: str, version: int, wanted: Conversion, *, force: bool, form: Output
) -> None:
    from ovmstrio.core.errors import ServerError

    with exit_on_error(EX_FAILED, ServerError, OSError), spinner(f"converting {source.name}") as step:
        from ovmstrio.inference.conversion import convert

        converted = convert(source, repository, name, version, wanted=wanted, force=force, begin_step=step)
    if form is Output.TABLE:
        _show(converted, name)
    else:
        show_data(_tensors(converted), _facts(converted), form)


def _prepare_several(
    folder: Path,
    found: Sequence[ModelSource],
    repository: Path,
    version: int,
    wanted: Conversion,
    *,
    force: bool,
    form: Output,
) -> None:
    from ovmstrio.core.errors import AlreadyExists, ServerError
    from ovmstrio.inference.conversion import convert

    config = repository / f"{folder.resolve().name}.json"
    with exit_on_error(EX_FAILED, OSError):
        document = _read_config(config)
    outcomes: dict[ModelSource, Outcome] = {}
    for model in found:
        with spinner(f"converting {model.path}") as step:
            try:
                outcomes[model] = convert(
                    model.path, repository, model.name, version, wanted=wanted, force=force, begin_step=step
                )
            except AlreadyExists:
                outcomes[model] = repository / model.name / str(version)
            except (ServerError, OSError) as error:
                outcomes[model] = error
    with exit_on_error(EX_FAILED, OSError):
        written = _write_config(config, document, {each.name: outcomes[each] for each in found})
    facts = [{"name": each.name, "source": str(each.path), **_outcome(outcomes[each])} for each in found]
    show_data(_models(folder, outcomes), {"models": facts, "config": written and str(written)}, form)
    if form is not Output.JSON:
        _show_failures(outcomes)
    if form is Output.TABLE and written:
        next_steps(f"ovms serve --config-path {written}")
    if any(isinstance(outcome, Exception) for outcome in outcomes.values()):
        raise typer.Exit(EX_FAILED)


def _write_config(path: Path, document: dict[str, Any], outcomes: Mapping[str, Outcome]) -> Path | None:
    """Add the prepared models to the configuration of earlier runs, and write it; keep whatever else it has."""
    before = {each["config"]["name"]: each for each in document.get("model_config_list", [])}
    listed = {}
    for name, outcome in outcomes.items():
        if name in before or not isinstance(outcome, Exception):
            listed[name] = before.pop(name, {"config": {"name": name, "base_path": name}})
        if isinstance(outcome, Exception | Path):
            continue
        listed[name]["config"].pop("stateful", None)
        listed[name]["config"] |= {"stateful": True} if outcome.state else {}
    if not listed:
        return None
    changed = document | {"model_config_list": [*listed.values(), *before.values()]}
    path.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    return path


def _read_config(path: Path) -> dict[str, Any]:
    """Read the configuration of an earlier run, {} without one; exit if the file is something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        names = [each["config"]["name"] for each in document.get("model_config_list", [])]
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError):
        names = [None]
    if not all(isinstance(name, str) for name in names):
        fail(f"{path} exists, but is not a configuration in JSON that lists models: move it away", EX_FAILED)
    return dict(document)


def _outcome(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Path):
        return {"directory": str(outcome), "is_there_already": True}
    return {"error": str(outcome)} if isinstance(outcome, Exception) else _facts(outcome)


def _facts(converted: Converted) -> dict[str, Any]:
    def facts(specs: Sequence[TensorSpec]) -> list[Mapping[str, Any]]:
        return [{"name": spec.name, "datatype": spec.datatype.name, "shape": spec.reported_shape} for spec in specs]

    quantized = {"calibrated_with": converted.samples} if converted.samples else {}
    return {
        "directory": str(converted.directory),
        "framework": converted.framework,
        "inputs": facts(converted.inputs),
        "outputs": facts(converted.outputs),
        "state": dict(converted.state),
        **quantized,
    }


def _tensors(converted: Converted) -> Table:
    from rich.table import Table

    table = Table("side", "name", "type", "shape", box=None, pad_edge=False, header_style="bold")
    for kind, specs in (("input", converted.inputs), ("output", converted.outputs)):
        for spec in specs:
            shape = safe(f"[{','.join(map(str, spec.shape))}]")
            table.add_row(f"[dim]{kind}[/]", safe(spec.name), spec.datatype.name, shape)
    return table


def _show(converted: Converted, name: str) -> None:
    quantized = f", quantized to int8 with {count(converted.samples, 'sample')}" if converted.samples else ""
    print_result(f"[green]prepared[/] {safe(str(converted.directory))} from {converted.framework}{quantized}")
    print_table(_tensors(converted))
    for before, after in converted.state.items():
        print_result(f"[dim]state[/]   {safe(before)} <- {safe(after)}")
    stateful = " --stateful" if converted.state else ""
    serve = f"ovms serve --model-name {name} --model-path {converted.directory.parent}{stateful}"
    infer = [f"ovms infer --model {name} --input {each.name}=data.npy" for each in converted.inputs[:1]]
    next_steps(serve, *infer)


def _models(folder: Path, outcomes: Mapping[ModelSource, Outcome]) -> Table:
    from rich.table import Table

    columns = ("model", "from", "framework", "inputs", "outputs", "result")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for model, outcome in outcomes.items():
        begin = [f"[bold cyan]{safe(model.name)}[/]", safe(str(model.path.relative_to(folder)))]
        if isinstance(outcome, Exception):
            table.add_row(*begin, "", "", "", "[red]failed[/]")
        elif isinstance(outcome, Path):
            table.add_row(*begin, "", "", "", f"[green]already exists[/] {safe(str(outcome))}")
        else:
            sides = ["\n".join(_format_spec(spec) for spec in side) for side in (outcome.inputs, outcome.outputs)]
            table.add_row(*begin, outcome.framework, *sides, f"[green]prepared[/] {safe(str(outcome.directory))}")
    return table


def _show_failures(outcomes: Mapping[ModelSource, Outcome]) -> None:
    if any(isinstance(outcome, Path) for outcome in outcomes.values()):
        print_message("existing versions were kept; --force replaces them")
    for error in (outcome for outcome in outcomes.values() if isinstance(outcome, Exception)):
        stderr().print(f"[bold red]error:[/] {safe(str(error))}", highlight=False, soft_wrap=True)


def _format_spec(spec: TensorSpec) -> str:
    return safe(f"{spec.name} {spec}")


def next_steps(*commands: str) -> None:
    """Print the commands to run next, without empty ones."""
    stderr().print("\n[bold]next[/]", highlight=False)
    for command in filter(None, commands):
        print_message(f"  {command}", style="")
