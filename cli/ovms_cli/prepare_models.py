"""Models of other formats for ``ovms prepare``: one, or all of a folder, and what is told of what came out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ovms_cli.console import EX_USAGE, ending_with, fail, note, say, stderr
from ovms_cli.exits import EX_FAILED
from ovms_cli.problems import count, safe
from ovms_cli.tables import Output, print_table, show_data

if TYPE_CHECKING:
    from rich.table import Table

    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.openvino.conversion import Conversion, Converted
    from ovmstrio.openvino.conversion.sources import FoundModel

__all__ = ["next_steps", "prepare_models"]


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
    """Convert the model at a path, or each model of a folder, into the repository, and tell what came out.

    Ends the command with 1 if a model cannot be converted; those of a folder beside it are converted all the same.
    """
    from ovmstrio.core.errors import ServerError
    from ovmstrio.observability.logs import configure_logs
    from ovmstrio.openvino.conversion.sources import find_models

    configure_logs(level="ERROR")
    with ending_with(EX_FAILED, ServerError, OSError):
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
        fail(f"{source} holds {number} models, and {' and '.join(given)} is for one: give its own path", EX_USAGE)


def _prepare_one(
    source: Path, repository: Path, name: str, version: int, wanted: Conversion, *, force: bool, form: Output
) -> None:
    from ovmstrio.core.errors import ServerError

    with ending_with(EX_FAILED, ServerError, OSError), stderr().status(f"converting {source.name} ..."):
        from ovmstrio.openvino.conversion import convert

        converted = convert(source, repository, name, version, wanted=wanted, force=force)
    if form is Output.TABLE:
        _show(converted, name)
    else:
        show_data(_tensors(converted), _facts(converted), form)


def _prepare_several(
    folder: Path,
    found: Sequence[FoundModel],
    repository: Path,
    version: int,
    wanted: Conversion,
    *,
    force: bool,
    form: Output,
) -> None:
    from ovmstrio.core.errors import ServerError
    from ovmstrio.openvino.conversion import convert

    outcomes: dict[FoundModel, Converted | Exception] = {}
    for model in found:
        with stderr().status(f"converting {model.path} ..."):
            try:
                outcomes[model] = convert(model.path, repository, model.name, version, wanted=wanted, force=force)
            except (ServerError, OSError) as error:
                outcomes[model] = error
    converted = {each.name: made for each, made in outcomes.items() if not isinstance(made, Exception)}
    config = _write_config(folder, repository, converted)
    facts = [{"name": each.name, "source": str(each.path), **_outcome(outcomes[each])} for each in found]
    show_data(_models(folder, outcomes), {"models": facts, "config": config and str(config)}, form)
    if form is not Output.JSON:
        _show_failures(outcomes)
    if form is Output.TABLE and config:
        next_steps(f"ovms serve --config_path {config}")
    if len(converted) < len(found):
        raise typer.Exit(EX_FAILED)


def _write_config(folder: Path, repository: Path, converted: Mapping[str, Converted]) -> Path | None:
    """Write a configuration that serves all models of a folder, called like it."""
    if not converted:
        return None
    path = repository / f"{folder.resolve().name}.json"
    entries = [
        {"config": {"name": name, "base_path": name, **({"stateful": True} if made.state else {})}}
        for name, made in converted.items()
    ]
    path.write_text(json.dumps({"model_config_list": entries}, indent=2) + "\n", encoding="utf-8")
    return path


def _outcome(outcome: Converted | Exception) -> dict[str, Any]:
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
    say(f"[green]prepared[/] {converted.directory} from {converted.framework}{quantized}")
    print_table(_tensors(converted))
    for before, after in converted.state.items():
        say(f"[dim]state[/]   {safe(before)} <- {safe(after)}")
    stateful = " --stateful" if converted.state else ""
    serve = f"ovms serve --model_name {name} --model_path {converted.directory.parent}{stateful}"
    infer = [f"ovms infer --model {name} --input {each.name}=data.npy" for each in converted.inputs[:1]]
    next_steps(serve, *infer)


def _models(folder: Path, outcomes: Mapping[FoundModel, Converted | Exception]) -> Table:
    from rich.table import Table

    columns = ("model", "from", "framework", "inputs", "outputs", "result")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for model, outcome in outcomes.items():
        begin = [f"[bold cyan]{safe(model.name)}[/]", safe(str(model.path.relative_to(folder)))]
        if isinstance(outcome, Exception):
            table.add_row(*begin, "", "", "", "[red]failed[/]")
        else:
            sides = ["\n".join(_told(spec) for spec in side) for side in (outcome.inputs, outcome.outputs)]
            table.add_row(*begin, outcome.framework, *sides, f"[green]prepared[/] {safe(str(outcome.directory))}")
    return table


def _show_failures(outcomes: Mapping[FoundModel, Converted | Exception]) -> None:
    for error in (outcome for outcome in outcomes.values() if isinstance(outcome, Exception)):
        stderr().print(f"[bold red]error:[/] {safe(str(error))}", highlight=False, soft_wrap=True)


def _told(spec: TensorSpec) -> str:
    return safe(f"{spec.name} {spec}")


def next_steps(*commands: str) -> None:
    """Tell which commands come next; empty ones are left out."""
    stderr().print("\n[bold]next[/]", highlight=False)
    for command in filter(None, commands):
        note(f"  {command}", style="")
