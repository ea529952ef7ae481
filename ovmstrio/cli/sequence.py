"""``ovms sequence``: commands for one sequence of a stateful model."""

from __future__ import annotations

from typing import Annotated

import typer

from ovmstrio.cli.console import EX_USAGE, ending_with, note
from ovmstrio.cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking
from ovmstrio.cli.tables import Output, chosen

_LARGEST_ID = 2**64 - 1


_Model = Annotated[str, typer.Option("--model", help="The stateful model.", show_default=False)]
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
    typer.Option("--chunk", min=1, help="Length of each part; default: the input's size.", show_default=False),
]
_Axis = Annotated[int, typer.Option("--axis", help="The axis of the model's input to cut along.")]
_Whole = Annotated[
    list[str] | None,
    typer.Option("--whole", metavar="NAME", help="Send all of this input at each step. May be repeated."),
]
_Pad = Annotated[
    bool | None,
    typer.Option(
        "--pad/--drop_last",
        help="Pad a short last part with zeros, or drop it. By default it is padded if the input has a fixed size, "
        "and sent as it is otherwise.",
        show_default=False,
    ),
]
_SequenceId = Annotated[
    int | None,
    typer.Option(
        "--sequence_id", min=1, max=_LARGEST_ID, help="Id of the sequence; default: a random id.", show_default=False
    ),
]
_Version = Annotated[str, typer.Option("--version", help="Version of the model; default: its default version.")]
_Output = Annotated[
    str,
    typer.Option(
        "--output",
        help="table or csv: a summary of the outputs; json: a line for each step. A file ending in .npz, .npy or "
        ".json receives the outputs of all steps.",
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
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print a line of JSON for each step, even if --output is a file.")
]


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
    """Stream an array through a sequence: start the sequence, send the array part by part, and end the sequence.

    The command cuts the inputs that are longest along the axis, and sends all other inputs completely at each step. It
    prints which inputs it cuts on standard error. Values are converted to the datatype and rank of the model's
    metadata. .wav files are decoded to values from -1 to 1; for an INT16 input, 16-bit samples stay unchanged.

    If the command ends early, it ends the sequence on the server first, also after Ctrl-C. A second Ctrl-C does not
    wait for the server.

    Exit codes: 0 if every step succeeded, 1 if the server refuses or an input does not fit, 2 if the server does not
    answer, 64 if the command line is wrong, 130 if it is interrupted.
    """
    from ovmstrio.cli.sequence_run import SequenceModel, new_id, stream_steps
    from ovmstrio.cli.sequence_show import Keeping, show
    from ovmstrio.cli.sequence_steps import Cutting, WrongOption, plan
    from ovmstrio.cli.tensor_output import FORMS
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
