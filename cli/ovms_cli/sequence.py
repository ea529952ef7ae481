"""``ovms sequence``: what is done with one sequence of a stateful model."""

from __future__ import annotations

from typing import Annotated

import typer

from ovms_cli.console import EX_USAGE, ending_with, note
from ovms_cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking
from ovms_cli.tables import Output, chosen

_LARGEST_ID = 2**64 - 1


_Model = Annotated[str, typer.Option("--model", help="The stateful model.", show_default=False)]
_Given = Annotated[
    list[str],
    typer.Option(
        "--input",
        metavar="[NAME=]FILE",
        help="NAME where the model has several inputs; - is standard input. .npy, .npz, .wav, .json, anything else "
        "as raw bytes. May be repeated.",
        show_default=False,
    ),
]
_Chunk = Annotated[
    int | None,
    typer.Option("--chunk", min=1, help="Length of a step's part; by default the input's size.", show_default=False),
]
_Axis = Annotated[int, typer.Option("--axis", help="The axis to cut along, of the input as the model takes it.")]
_Whole = Annotated[
    list[str] | None,
    typer.Option("--whole", metavar="NAME", help="Send this input whole at each step. May be repeated."),
]
_Pad = Annotated[
    bool | None,
    typer.Option(
        "--pad/--drop_last",
        help="Fill a last part that is too short with zeros, or leave it out. By default it is filled where the "
        "input has a fixed size, and sent as it is elsewhere.",
        show_default=False,
    ),
]
_SequenceId = Annotated[
    int | None,
    typer.Option(
        "--sequence_id", min=1, max=_LARGEST_ID, help="Id of the sequence; by default any.", show_default=False
    ),
]
_Version = Annotated[str, typer.Option("--version", help="A version other than the default.")]
_Output = Annotated[
    str,
    typer.Option(
        "--output",
        help="table or csv: what the outputs were in sum; json: a line for each step. A file, .npz, .npy or .json, "
        "gets the outputs of all steps.",
    ),
]
_Join = Annotated[
    int | None,
    typer.Option(
        "--join",
        metavar="AXIS",
        help="Join saved outputs along this axis; by default they are stacked along a new first one.",
        show_default=False,
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each step, though --output be a file.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Stream data through one sequence of a stateful model.")
    group.callback()(_group)
    group.command()(run)
    app.add_typer(group, name="sequence")


def _group() -> None:
    """Stream data through one sequence of a stateful model."""


def run(
    *,
    model: _Model,
    given: _Given,
    chunk: _Chunk = None,
    axis: _Axis = 0,
    whole: _Whole = None,
    pad: _Pad = None,
    sequence_id: _SequenceId = None,
    version: _Version = "",
    output: _Output = Output.TABLE,
    join: _Join = None,
    as_json: _AsJson = False,
    url: Url = "",
    rest: Rest = False,
    timeout: Timeout = 60.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Stream an array through a sequence: start it, go through the array part by part, and end it.

    Of several inputs, the longest along the axis is cut, and with it those that are as long; all others are sent whole
    at each step. Which is which is said on standard error. Values are brought to the element type and rank that the
    model's metadata asks for, and .wav files are decoded to -1 to 1 (16 bits as they are where the input is INT16).

    Whatever ends the command early, Ctrl-C included, ends the sequence on the server first; a second Ctrl-C does not
    wait for that.

    Exits with 0 if every step was answered, with 1 if the server or an input says no, with 2 if nobody answers, with 64
    if the command line is wrong, with 130 if it is interrupted.
    """
    from ovms_cli.sequence_run import SequenceModel, new_id, stream_steps
    from ovms_cli.sequence_show import Keeping, show
    from ovms_cli.sequence_steps import Cutting, WrongOption, plan
    from ovms_cli.tensor_output import FORMS
    from ovmstrio.core.errors import InvalidRequest

    cutting = Cutting(chunk, axis, pad, frozenset(whole or ()))
    with ending_with(EX_USAGE, InvalidRequest):
        file = "" if output in FORMS else output
        keeping = Keeping.of(file, join) if file or join is not None else Keeping()
    form = chosen(Output.TABLE if file else Output(output), as_json=as_json)
    with asking(url, rest=rest, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        known = client.metadata(model, version)
        with ending_with(EX_USAGE, WrongOption):
            steps = plan(given, known.inputs, cutting, note)
        called = SequenceModel(client, model, version, {tensor.name: tensor.datatype for tensor in known.inputs})
        number = sequence_id or new_id()
        show(stream_steps(called, steps, number), number, len(steps), keeping, form)
