"""Turn a model of any framework into a version directory of a repository that is known to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import openvino as ov

from ovmstrio.config.mapping import NO_MAPPING
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.openvino.compile import ModelFile, compile_model
from ovmstrio.openvino.conversion.frameworks import read_source
from ovmstrio.openvino.conversion.inputs import InputForm, describe_inputs
from ovmstrio.openvino.conversion.new_folders import new_version, refuse_existing
from ovmstrio.openvino.conversion.quantization import quantize
from ovmstrio.openvino.conversion.sources import framework_of
from ovmstrio.openvino.conversion.states import make_stateful
from ovmstrio.openvino.signature import own_specs, read_signature

__all__ = ["Conversion", "Converted", "convert", "save"]

_MODEL: Final = "model.xml"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is asked of a conversion.

    ``state`` maps inputs to the outputs that hold their next value; with ``stateful`` and no pairs they are found by
    name and shape.  ``fp16`` stores the weights in half precision.  ``inputs`` tells types and shapes of inputs.
    ``calibration`` is a folder of samples with which the model is quantized to int8.
    """

    fp16: bool = False
    stateful: bool = False
    low_latency: bool = False
    state: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, InputForm] = field(default_factory=dict)
    calibration: Path | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """What came out: where it lies and how it is called.

    ``state`` holds the pairs that became variables, ``samples`` is with how many it was quantized.
    """

    directory: Path
    framework: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: Mapping[str, str]
    samples: int = 0


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
        ConfigError: the source cannot be read, not be transformed as asked, or what comes out cannot be loaded; the
            message names the way out, and nothing is written.
        AlreadyExists: the version exists and ``force`` is not set.
    """
    wanted = wanted or Conversion()
    target = repository / name / str(version)
    framework = framework_of(source)
    refuse_existing(target, "--version", force=force)
    model = read_source(source, framework)
    describe_inputs(source, model, wanted.inputs)
    read_signature(model, NO_MAPPING, str(source))  # refuses what no protocol can carry
    samples = 0
    if wanted.calibration is not None:
        model, samples = quantize(source, model, wanted.calibration)
    pairs = wanted.state if wanted.stateful or wanted.state else None
    state = make_stateful(source, model, pairs=pairs, low_latency=wanted.low_latency)
    inputs, outputs = own_specs(model.inputs, is_input=True), own_specs(model.outputs, is_input=False)
    with new_version(repository, name, version, force=force) as directory:
        save(model, directory, fp16=wanted.fp16)
        _load(source, directory, name)
    return Converted(target, framework, inputs, outputs, state, samples)


def _load(source: Path, directory: Path, name: str) -> None:
    """Load what was written as a server would.

    Raises:
        ConfigError: it cannot be loaded.
    """
    spec = ModelSpec(name=name, base_path=directory.parent)
    try:
        compile_model(ModelFile(directory / _MODEL, spec))
    except ConfigError as error:
        raise ConfigError([replace(problem, file=str(source)) for problem in error.problems]) from error
