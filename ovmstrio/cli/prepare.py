"""``ovms prepare``: convert a model file or a sample into a versioned entry of a model repository."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.console import EX_USAGE, exit_on_error, fail
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen

if TYPE_CHECKING:
    from ovmstrio.inference.conversion import InputSpec

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


class Quantization(StrEnum):
    """Datatype of quantized weights and activations."""

    INT8 = "int8"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(prepare)


_ModelFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL_FILE",
        help="ONNX, TensorFlow (SavedModel folder, .pb), .tflite, Paddle (.pdmodel, folder), PyTorch (.pt2, "
        "TorchScript .pt), OpenVINO .xml; or a folder, of which all models are converted.",
    ),
]
_Name = Annotated[
    str, typer.Option("--name", metavar="NAME", help="Name of the served model. Default: the name of the file.")
]
_Version = Annotated[int, typer.Option("--version", min=1, metavar="N", help="Version to write.")]
_Repository = Annotated[Path, typer.Option("--repository", metavar="DIR", help="Folder of the model repository.")]
_Fp16 = Annotated[bool, typer.Option("--fp16", help="Store the weights in half precision.")]
_Stateful = Annotated[
    bool, typer.Option("--stateful", help="Turn inputs that receive the last call's outputs into model state.")
]
_State = Annotated[
    list[str] | None,
    typer.Option(
        "--state", metavar="IN=OUT", help="Input and its output for --stateful. Default: detected. Repeatable."
    ),
]
_LowLatency = Annotated[
    bool, typer.Option("--low-latency", help="Keep the state of loops (TensorIterator, Loop) between calls.")
]
_Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=TYPE[SIZES]",
        help="Type and shape of an input, such as x=FP32[-1,4]. Required if the file has none (TorchScript); otherwise "
        "restricts them. Repeatable.",
    ),
]
_Quantize = Annotated[
    Quantization | None,
    typer.Option(
        "--quantize",
        metavar="int8",
        help="Compute in this type where the loss of accuracy is small; requires --calibration.",
    ),
]
_Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="DIR",
        help="Samples for --quantize: .npy files; for several inputs, one folder per input, named after it.",
    ),
]
_Force = Annotated[bool, typer.Option("--force", help="Replace the version if it exists.")]
_Sample = Annotated[str, typer.Option("--sample", metavar="NAME", help="Prepare a sample; --list lists their names.")]
_ListSamples = Annotated[bool, typer.Option("--list", help="List the samples.")]


def prepare(
    model_file: _ModelFile = None,
    *,
    name: _Name = "",
    version: _Version = 1,
    repository: _Repository = Path("models"),
    fp16: _Fp16 = False,
    stateful: _Stateful = False,
    state: _State = None,
    low_latency: _LowLatency = False,
    inputs: _Inputs = None,
    quantize: _Quantize = None,
    calibration: _Calibration = None,
    force: _Force = False,
    sample: _Sample = "",
    list_samples: _ListSamples = False,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Convert a model file, a folder of models or a sample into versioned repository entries for ``ovms serve``."""
    if sum((list_samples, bool(sample), model_file is not None)) != 1:
        fail("give either a MODEL_FILE, or --sample NAME, or --list", EX_USAGE)
    form = chosen(form, as_json=as_json)
    if list_samples:
        from ovmstrio.cli.prepare_samples import list_samples as show_samples

        show_samples(form)
    elif sample:
        from ovmstrio.cli.prepare_samples import prepare_sample

        if name or fp16 or stateful or state or low_latency or inputs or quantize or calibration:
            fail("--sample sets name, precision and state: remove the other options", EX_USAGE)
        prepare_sample(sample, repository, version, force=force, form=form)
    elif model_file is not None:
        from ovmstrio.cli.prepare_models import prepare_models
        from ovmstrio.inference.conversion import Conversion

        pairs = _pairs(state or [])
        if pairs and not stateful:
            fail("--state requires --stateful: give both", EX_USAGE)
        _check_quantization(quantize, calibration, keeps_state=stateful or low_latency)
        if name and not _NAME.fullmatch(name):
            fail(f"--name: expected letters, digits and _ . + -, got {name!r}", EX_USAGE)
        wanted = Conversion(fp16, stateful, low_latency, pairs, _forms(inputs or []), calibration)
        prepare_models(model_file, repository, name, version, wanted, force=force, form=form)


def _check_quantization(quantize: Quantization | None, calibration: Path | None, *, keeps_state: bool) -> None:
    if bool(quantize) != bool(calibration):
        fail("--quantize int8 and --calibration DIR require each other: give both", EX_USAGE)
    if quantize and keeps_state:
        fail("--quantize cannot be combined with --stateful or --low-latency: samples contain no state", EX_USAGE)
    if calibration is not None and not calibration.is_dir():
        fail(f"--calibration: expected a folder with .npy files, got {calibration}", EX_USAGE)


def _forms(options: Sequence[str]) -> dict[str, InputSpec]:
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.inference.conversion import parse_input_form

    with exit_on_error(EX_USAGE, ConfigError):
        return dict(map(parse_input_form, options))


def _pairs(options: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for option in options:
        name, separator, successor = option.partition("=")
        if not (name and separator and successor):
            fail(f"--state: expected INPUT=OUTPUT, got {option!r}", EX_USAGE)
        pairs[name] = successor
    return pairs
