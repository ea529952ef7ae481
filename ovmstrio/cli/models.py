"""`ovms models`: list of the models of a server, with states, inputs and outputs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import data_table
from ovmstrio.cli.problems import safe
from ovmstrio.cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking, model_metadata
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, show_data

if TYPE_CHECKING:
    from rich.table import Table

    from ovmstrio.client import ModelInfo, ModelState, TensorInfo

    Known = dict[tuple[str, str], ModelInfo]
    """Metadata by name and version."""

_COLOURS = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(models)


def models(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Show only this model.")] = "",
    *,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    rest: Rest = None,
    timeout: Timeout = 10.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """List the models of a server with their versions, states, inputs and outputs.

    Exit codes: 0 if the server answered, 1 if there is no such model or the server refuses the request, 2 if the server
    does not answer, 64 if the command line is wrong.
    """
    with asking(url, rest=rest, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        states = [state for state in client.models() if name in {"", state.name}]
        if name and not states:
            model_metadata(client, name)  # Raises the error of the server for this name.
        ready = [(state.name, state.version) for state in states if state.state == "READY"]
        known = {each: client.metadata(*each) for each in ready}
    show_data(_table(states, known), _as_data(states, known), form, as_json=as_json)


def _as_data(states: list[ModelState], known: Known) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = [asdict(state) for state in states]
    for entry in listed:
        info = known.get((entry["name"], entry["version"]))
        if info is not None:
            described = asdict(info)
            entry |= {key: described[key] for key in ("platform", "inputs", "outputs")}
    return listed


def _table(states: list[ModelState], known: Known) -> Table:
    table = data_table("model", "version", "state", "inputs", "outputs", "reason")
    for state in states:
        info = known.get((state.name, state.version))
        colour = _COLOURS.get(state.state, "red")
        table.add_row(
            safe(state.name),
            safe(state.version),
            f"[{colour}]{safe(state.state)}[/]",
            _inputs(info) if info else "",
            _tensors(info.outputs) if info else "",
            safe(state.reason),
        )
    return table


def _inputs(info: ModelInfo) -> str:
    """Return the input tensors, or the platform of a service without tensors."""
    if info.inputs or info.outputs:
        return _tensors(info.inputs)
    return f"[dim]no tensors ({safe(info.platform)})[/]"


def _tensors(tensors: tuple[TensorInfo, ...]) -> str:
    """Return a line for each tensor; the tensors of graphs have no datatype and shape."""
    from ovmstrio.cli.tensor_files import is_typed

    return "\n".join(
        safe(f"{each.name} {each.datatype} {list(each.shape)}" if is_typed(each) else each.name) for each in tensors
    )
