"""`ovms infer`: call a model with files, and show or save its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ovms_cli.console import EX_USAGE, ending_with, note, stderr
from ovms_cli.server_options import Ca, Cert, Key, Rest, Timeout, Url, asking

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.tensor import Array

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(infer)


def infer(
    *,
    model: Annotated[str, typer.Option("--model", help="The model to call.", show_default=False)],
    given: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="FILE, or NAME=FILE where the model has several inputs; - is standard input. "
            ".npy, .npz, .json, .wav, images, anything else as raw bytes. May be repeated.",
            show_default=False,
        ),
    ],
    version: Annotated[str, typer.Option("--version", help="A version other than the default.")] = "",
    encoded: Annotated[
        bool, typer.Option("--encoded", help="Send image files as they are: the server decodes and resizes them.")
    ] = False,
    mean: Annotated[
        float | None, typer.Option("--mean", help="Subtracted from the pixels of images.", show_default=False)
    ] = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Divides the pixels of images.", show_default=False)
    ] = None,
    output: Annotated[str, typer.Option("--output", help="table, json, or a file: .npy, .npz, .json.")] = "table",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Call so many times and sum up the latencies.")] = 1,
    url: Url = "",
    rest: Rest = False,
    timeout: Timeout = 60.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Call a model.

    Values are brought to the element type and rank that the model's metadata asks for, which is said on standard error;
    a value that would change is refused. Images are decoded as RGB, 0 to 255 or
    (pixel - mean) / scale, and resized to the input's size.

    Exits with 0 if the model answered, with 1 if the server or an input says no, with 2 if nobody answers,
    with 64 if the command line is wrong, with 130 if it is interrupted.
    """
    from ovms_cli.tensor_files import read_inputs
    from ovms_cli.tensor_images import ImageOptions
    from ovms_cli.tensor_output import check_target, write_outputs
    from ovmstrio.core.errors import InvalidRequest

    images = ImageOptions(encoded, mean, scale)
    with ending_with(EX_USAGE, InvalidRequest):
        check_target(output)
        images.check(given)
    with asking(url, rest=rest, timeout=timeout, ca=ca, cert=cert, key=key) as client:
        known = client.metadata(model, version)
        inputs = read_inputs(given, known.inputs, note, images)
        # An encoded image is BYTES even where the input takes pixels.
        datatypes = {tensor.name: tensor.datatype for tensor in known.inputs if not inputs[tensor.name].dtype.hasobject}
        outputs, seconds = _timed(lambda: client.infer(model, inputs, version=version, datatypes=datatypes), repeat)
        write_outputs(outputs, output)
    if repeat > 1:
        _print_latencies(seconds)


def _timed(call: Callable[[], dict[str, Array]], repeat: int) -> tuple[dict[str, Array], list[float]]:
    from time import perf_counter

    outputs: dict[str, Array] = {}
    seconds = []
    for _ in range(repeat):
        started = perf_counter()
        outputs = call()
        seconds.append(perf_counter() - started)
    return outputs, seconds


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
