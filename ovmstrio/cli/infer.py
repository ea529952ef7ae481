"""`ovms infer`: call a model with files, and show or save the response."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.console import EX_USAGE, exit_on_error, fail, print_message, stderr
from ovmstrio.cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking, model_metadata
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.client import Client, ModelInfo
    from ovmstrio.core.tensor import Array

    _Answer = tuple[dict[str, Array], int]
    """Outputs by name, and the number of pieces that they were streamed in."""

_HANDLER: Final = "handler"
"""Platform of services that take an HTTP body instead of tensors."""


_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]
_Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT",
        help="FILE, JSON such as '[[1, 2]]', or - for standard input; INPUT=... if the model has several inputs.",
    ),
]
_Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Name of the model, instead of the first argument.")
]
_Given = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="[NAME=]INPUT",
        help="FILE or JSON, or NAME=... if the model has several inputs; - is standard input. "
        ".npy, .npz, .json, .wav and images are decoded, other files are raw bytes; a graph also takes a TEXT. "
        "Repeatable.",
        show_default=False,
    ),
]
_Version = Annotated[
    str, typer.Option("--version", metavar="VERSION", help="Version of the model. Default: the default version.")
]
_Encoded = Annotated[
    bool, typer.Option("--encoded", help="Send image files undecoded: the server decodes and resizes them.")
]
_Mean = Annotated[
    float | None, typer.Option("--mean", metavar="NUMBER", help="Value to subtract from the pixels of images.")
]
_Scale = Annotated[
    float | None, typer.Option("--scale", metavar="NUMBER", help="Value to divide the pixels of images by.")
]
_Output = Annotated[str, typer.Option("--output", metavar="FILE", help="Write outputs to a file: .npy, .npz, .json.")]
_Repeat = Annotated[
    int, typer.Option("--repeat", min=1, metavar="N", help="Number of calls; more than 1 prints latency percentiles.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(infer)


def infer(
    name: _Name = "",
    inputs: _Inputs = None,
    *,
    model: _Model = None,
    given: _Given = None,
    version: _Version = "",
    encoded: _Encoded = False,
    mean: _Mean = None,
    scale: _Scale = None,
    output: _Output = "",
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    repeat: _Repeat = 1,
    url: Url = "",
    rest: Rest = None,
    timeout: Timeout = 60.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Call a model, a graph, a pipeline or a handler.

    Values are converted to the datatype and rank in the model's metadata, with a note on standard error. A conversion
    that would change a value is refused. Images are decoded as RGB, 0 to 255 or (pixel - mean) / scale, and resized to
    the input's size.

    Graphs and pipelines of Ops declare no datatypes: integers are sent as INT64, other numbers as FP64, and files other
    than arrays and JSON as they are. Streamed outputs of a graph are combined: texts are joined, other pieces are
    listed; over REST, the pieces are flat lists. A handler receives the file as the body of a POST over REST, and its
    response is shown.

    Exit codes: 0 if the model answered, 1 if the server refuses the request or an input is invalid, 2 if the server
    does not answer, 64 if the command line is wrong, 130 if interrupted.
    """
    from ovmstrio.cli.handler_call import post_file
    from ovmstrio.cli.tensor_files import read_inputs
    from ovmstrio.cli.tensor_images import ImageOptions
    from ovmstrio.cli.tensor_output import check_target, write_outputs
    from ovmstrio.core.errors import InvalidRequest

    inputs_given = [*(inputs or []), *(given or [])]
    if model is not None and name:
        inputs_given.insert(0, name)
    if not (model := model or name):
        fail("expected a model: ovms infer NAME INPUT, or --model NAME", EX_USAGE)
    target = output or chosen(form, as_json=as_json)
    images = ImageOptions(encoded, mean, scale)
    with exit_on_error(EX_USAGE, InvalidRequest):
        check_target(target)
        images.check(inputs_given)
    connect = partial(asking, url, timeout=timeout, ca=ca, cert=cert, key=key)
    with connect(rest=rest) as client:
        known = model_metadata(client, model, version)
        if known.platform == _HANDLER:
            # Handlers are called over REST only.
            with nullcontext(client) if rest is not None else connect(needs="REST") as over_rest:
                post_file(over_rest, model, inputs_given, target)
            return
        if known.inputs and not inputs_given:
            names = ", ".join(each.name for each in known.inputs)
            fail(f"{model} takes {names}; expected a file or JSON for each, as INPUT or --input", EX_USAGE)
        tensors = read_inputs(inputs_given, known.inputs, print_message, images)
        (outputs, pieces), seconds = _timed(lambda: _answer(client, known, version, tensors, timeout), repeat)
        if pieces > 1:
            print_message(f"{model} streams: {pieces} pieces joined; ovms stream shows each piece as it arrives")
        write_outputs(outputs, target)
    if repeat > 1:
        _print_latencies(seconds)


def _answer(client: Client, known: ModelInfo, version: str, inputs: dict[str, Any], timeout: float) -> _Answer:
    """Call a model; inputs without datatypes mean a graph, which may stream."""
    from ovmstrio.cli.tensor_files import is_typed

    if known.inputs and not any(map(is_typed, known.inputs)):
        return _stream(client, known, version, inputs, timeout)
    return _call(client, known, version, inputs)


_NO_SEQUENCE: Final = "Sequence ID has not been provided"


def _call(client: Client, known: ModelInfo, version: str, inputs: dict[str, Any]) -> _Answer:
    from ovmstrio.cli.tensor_files import is_typed
    from ovmstrio.core.errors import ServerError

    # An encoded image is BYTES even if the input's datatype is numeric.
    datatypes = {
        tensor.name: tensor.datatype
        for tensor in known.inputs
        if is_typed(tensor) and not inputs[tensor.name].dtype.hasobject
    }
    try:
        return client.infer(known.name, inputs, version=version, datatypes=datatypes), 1
    except ServerError as error:
        if _NO_SEQUENCE in error.message:
            print_message(
                f"{known.name} serves sequences: ovms sequence run --model {known.name} streams data through one"
            )
        raise


def _stream(client: Client, known: ModelInfo, version: str, inputs: dict[str, Any], timeout: float) -> _Answer:
    """Call a graph through a stream of one request: a unary call returns only the first piece of each output."""
    from ovmstrio.cli.gathered_replies import gather
    from ovmstrio.client import StreamRequest
    from ovmstrio.core.errors import NotFound

    try:
        return gather(client.stream(known.name, iter([StreamRequest(inputs)]), timeout=timeout))
    except NotFound:
        return _call(client, known, version, inputs)


def _timed(call: Callable[[], _Answer], repeat: int) -> tuple[_Answer, list[float]]:
    from time import perf_counter

    answer: _Answer = {}, 0
    seconds = []
    for _ in range(repeat):
        started = perf_counter()
        answer = call()
        seconds.append(perf_counter() - started)
    return answer, seconds


def _print_latencies(seconds: list[float]) -> None:
    import numpy as np

    points = {"min": 0, "median": 50, "p90": 90, "p99": 99, "max": 100}
    figures = np.percentile(np.array(seconds) * 1e3, list(points.values()))
    text = ", ".join(f"{name} {value:.2f}" for name, value in zip(points, figures, strict=True))
    stderr().print(
        f"{len(seconds)} calls, ms: {text}; {len(seconds) / sum(seconds):.0f} requests/s, one at a time",
        highlight=False,
        soft_wrap=True,
    )
