"""Conversion of a model into a version folder of a repository."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import openvino as ov
from openvino.frontend import FrontEndManager, OpConversionFailure

from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import NO_MAPPING
from ovmstrio.core.errors import AlreadyExists, ConfigError
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.conversion.inputs import InputSpec, apply_input_specs, make_stateful
from ovmstrio.inference.conversion.quantization import quantize
from ovmstrio.inference.conversion.sources import TORCH_EXPORT, TORCHSCRIPT, conversion_error, detect_framework
from ovmstrio.inference.conversion.torch_reader import read_torch
from ovmstrio.inference.model_readers import check_model_files, read_onnx_content, read_paddle
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.signature import model_specs, read_signature

_FRONTENDS: Final = {
    "OpenVINO IR": "ir",
    "ONNX": "onnx",
    "TensorFlow frozen graph": "tf",
    "TensorFlow SavedModel": "tf",
    "TensorFlow Lite": "tflite",
}


def read_source(source: Path, framework: str) -> ov.Model:
    """Read a model with the frontend of ``framework``, see :func:`~.sources.framework_of`.

    OpenVINO's own detection would try all frontends, and fail with the messages of all.

    Raises:
        ConfigError: the model cannot be read or converted.
    """
    if framework == "PaddlePaddle":
        model = read_paddle(source)
    elif framework in {TORCH_EXPORT, TORCHSCRIPT}:
        model = read_torch(source, framework)
    else:
        model = _read(source, framework)
    if not model.outputs:
        # Some frontends read an empty file as an empty model.
        raise conversion_error(source, f"the {framework} model has no outputs", "is the file complete?")
    return model


def _read(source: Path, framework: str) -> ov.Model:
    check_model_files(source)
    try:
        frontend = FrontEndManager().load_by_framework(_FRONTENDS[framework])
        return frontend.convert(frontend.load(str(source)))
    except OpConversionFailure as error:
        model = read_onnx_content(source)
        if model is not None:
            return model
        raise conversion_error(source, f"OpenVINO cannot convert the model: {openvino_error_message(error)}") from error
    except OPENVINO_ERRORS as error:
        raise conversion_error(
            source, f"cannot be read as {framework}: {openvino_error_message(error)}", "is the file complete?"
        ) from error


def check_not_existing(target: Path, another: str, *, force: bool) -> None:
    """Raise AlreadyExists if ``target`` exists and ``force`` is not set; ``another`` is the option that avoids it."""
    if target.exists() and not force:
        raise AlreadyExists(f"{target} exists; choose another {another}, or replace it with --force")


@contextmanager
def new_folder(target: Path, *, force: bool = False, another: str = "--repository") -> Iterator[Path]:
    """Provide a folder that becomes ``target`` when the block ends without error.

    A server that watches the repository never sees a partial folder. After an error, nothing is left, not even new
    parent folders.

    Raises:
        AlreadyExists: the target exists and ``force`` is not set; ``another`` is the option for another target.
    """
    check_not_existing(target, another, force=force)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        made = scratch / "made"
        made.mkdir()
        yield made
        if target.exists():
            target.rename(scratch / "replaced")
        made.rename(target)
    finally:
        shutil.rmtree(scratch)
        for parent in new_parents:
            with suppress(OSError):  # fails unless empty
                parent.rmdir()


@contextmanager
def new_version(repository: Path, name: str, version: int = 1, *, force: bool = False) -> Iterator[Path]:
    """Provide a folder that becomes ``<repository>/<name>/<version>``; see :func:`new_folder`."""
    with new_folder(repository / name / str(version), force=force, another="--version") as made:
        yield made


_MODEL: Final = "model.xml"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Options of a conversion.

    Attributes:
        state: input names to the outputs with their next value; empty to detect them by name and shape.
    """

    fp16: bool = False  # store the weights in half precision
    stateful: bool = False  # turn state inputs into variables
    low_latency: bool = False
    state: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, InputSpec] = field(default_factory=dict)  # types and shapes of inputs
    calibration: Path | None = None  # folder of samples for int8 quantization


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion."""

    directory: Path
    framework: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: Mapping[str, str]  # (input, output) pairs that became variables
    samples: int = 0  # number of samples used for quantization


def save(model: ov.Model, directory: Path, *, fp16: bool = False) -> None:
    """Write ``model.xml`` and ``model.bin`` into ``directory``."""
    ov.save_model(model, directory / _MODEL, compress_to_fp16=fp16)


def convert(
    source: Path,
    repository: Path,
    name: str,
    version: int = 1,
    *,
    wanted: Conversion | None = None,
    force: bool = False,
) -> Converted:
    """Convert ``source`` into ``<repository>/<name>/<version>/model.xml`` and ``model.bin``, and load it once.

    Raises:
        ConfigError: the model cannot be read, transformed or loaded; nothing is written.
        AlreadyExists: the version exists and ``force`` is not set.
    """
    wanted = wanted or Conversion()
    target = repository / name / str(version)
    framework = detect_framework(source)
    check_not_existing(target, "--version", force=force)
    model = read_source(source, framework)
    apply_input_specs(source, model, wanted.inputs)
    read_signature(model, NO_MAPPING, str(source))  # rejects unsupported tensors
    samples = 0
    if wanted.calibration is not None:
        model, samples = quantize(source, model, wanted.calibration)
    pairs = wanted.state if wanted.stateful or wanted.state else None
    state = make_stateful(source, model, pairs=pairs, low_latency=wanted.low_latency)
    inputs, outputs = model_specs(model.inputs, is_input=True), model_specs(model.outputs, is_input=False)
    with new_version(repository, name, version, force=force) as directory:
        save(model, directory, fp16=wanted.fp16)
        try:
            compile_model(ModelFile(directory / _MODEL, ModelSpec(name=name, base_path=directory.parent)))
        except ConfigError as error:
            raise ConfigError([replace(problem, file=str(source)) for problem in error.problems]) from error
    return Converted(target, framework, inputs, outputs, state, samples)
