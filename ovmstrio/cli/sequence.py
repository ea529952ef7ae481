"""``ovms sequence``: run a sequence of a stateful model, or list the live sequences."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import EX_USAGE, data_table, exit_on_error, print_message
from ovmstrio.cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking, model_metadata
from ovmstrio.cli.tables import FORMATS, FormatOption, JsonOption, Output, chosen, show_data

if TYPE_CHECKING:
    from rich.table import Table

    from ovmstrio.client import SequenceState

_LARGEST_ID = 2**64 - 1


_Model = Annotated[str, typer.Option("--model", metavar="NAME", help="The stateful model.", show_default=False)]
_Given = Annotated[
    list[str],
    typer.Option(
        "--input",
        metavar="[NAME=]FILE",
        help="NAME if the model has several inputs; - is standard input. .npy, .npz, .wav or .json; other files are "
        "raw bytes. May be repeated.",
        show_default=False,
    ),
]
_Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk", min=1, metavar="N", help="Length of each part; default: the input's size.", show_default=False
    ),
]
_Axis = Annotated[int, typer.Option("--axis", metavar="AXIS", help="The axis of the model's input to cut along.")]
_Whole = Annotated[
    list[str] | None,
    typer.Option("--unsliced", "--whole", metavar="NAME", help="Send all of this input at each step. May be repeated."),
]
_Pad = Annotated[
    bool | None,
    typer.Option(
        "--pad/--drop-last",
        help="Pad a short last part with zeros, or drop it. By default it is padded if the input has a fixed size, "
        "and sent as it is otherwise.",
        show_default=False,
    ),
]
_SequenceId = Annotated[
    int | None,
    typer.Option(
        "--sequence-id",
        min=1,
        max=_LARGEST_ID,
        metavar="ID",
        help="Id of the sequence; default: a random id.",
        show_default=False,
    ),
]
_Version = Annotated[
    str, typer.Option("--version", metavar="VERSION", help="Version of the model; default: its default version.")
]
_Output = Annotated[
    str,
    typer.Option("--output", metavar="FILE", help="Write the outputs of all steps to a file: .npz, .npy or .json."),
]
_Format = Annotated[
    Output,
    typer.Option(
        "--format",
        metavar=FORMATS,
        help="Format of the output; table or csv: a summary of the outputs, json: a line for each step.",
    ),
]
_Join = Annotated[
    int | None,
    typer.Option(
        "--join",
        metavar="AXIS",
        help="Join saved outputs along this axis; default: stack them along a new first axis.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Stream data through a sequence of a stateful model, or list its sequences.")
    group.command()(run)
    group.command("list")(list_sequences)
    app.add_typer(group, name="sequence")


def run(
    *,
    model: _Model,
    given: _Given,
    chunk: _Chunk = None,
    axis: _Axis = 0,
    unsliced: _Whole = None,
    pad: _Pad = None,
    sequence_id: _SequenceId = None,
    version: _Version = "",
    output: _Output = "",
    form: _Format = Output.TABLE,
    join: _Join = None,
    as_json: JsonOption = False,
    url: Url = "",
    rest: Rest = None,
    timeout: Timeout = 60.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Stream an array through a sequence: start the sequence, send the array part by part, and end the sequence.

    The command cuts the inputs that are longest along the axis, and sends all other inputs completely at each step. It
    prints which inputs it cuts on standard error. Values are converted to the datatype and rank of the model's
    metadata. .wav files are decoded to values from -1 to 1; for an INT16 input, 16-bit samples stay unchanged.

    If the command ends early, it ends the sequence on the server first, also after Ctrl-C. A second Ctrl-C does not
    wait for the server.

    Exit codes: 0 if every step succeeded, 1 if the server refuses or an input does not fit, 2 if the server does not
    answer, 64 if the command line is wrong, 130 if it is interrupted.
    """
    from ovmstrio.cli.sequence_inputs import SliceOptions, WrongOption, plan
    from ovmstrio.cli.sequence_run import SequenceModel, new_id, stream_steps
    from ovmstrio.cli.sequence_show import OutputRecorder, show
    from ovmstrio.core.errors import InvalidRequest

    slicing = SliceOptions(chunk, axis, pad, frozenset(unsliced or ()))
    with exit_on_error(EX_USAGE, InvalidRequest):
        recorder = OutputRecorder.from_options(output, join) if output or join is not None else OutputRecorder()
    with asking(url, rest=rest, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        known = model_metadata(client, model, version)
        with exit_on_error(EX_USAGE, WrongOption):
            steps = plan(given, known.inputs, slicing, print_message)
        called = SequenceModel(client, model, version, {tensor.name: tensor.datatype for tensor in known.inputs})
        number = sequence_id or new_id()
        show(stream_steps(called, steps, number), number, len(steps), recorder, chosen(form, as_json=as_json))


def list_sequences(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="The stateful model.")],
    *,
    version: Annotated[
        str, typer.Option("--version", metavar="VERSION", help="Version of the model; default: the highest.")
    ] = "",
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    timeout: Timeout = 10.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """List the live sequences of a stateful model: age, time since the last request, and number of requests.

    Uses the REST port. Exit codes: 0 on success, 1 if the model does not exist or the server refuses, 2 if the server
    does not answer, 64 if the command line is wrong.
    """
    with asking(url, needs="REST", timeout=timeout, ca=ca, cert=cert, key=key) as client:
        listed = client.sequences(name, version)
    show_data(_table(listed), [asdict(sequence) for sequence in listed], form, as_json=as_json)


def _table(listed: list[SequenceState]) -> Table:
    table = data_table("sequence", "age", "idle", "requests", justify="right")
    for each in listed:
        table.add_row(str(each.id), f"{each.age_seconds:.0f} s", f"{each.idle_seconds:.0f} s", str(each.requests))
    return table
