"""Turn a model file of any framework into a version directory of a repository, ready to be served.

OpenVINO's frontends read the file; what comes out is always IR.  Nothing of the source's framework has to be
installed, but for PyTorch exports, which only torch itself can unpickle.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import openvino as ov
from openvino.frontend import (
    FrontEndManager,
    GeneralFailure,
    InitializationFailure,
    NotImplementedFailure,
    OpConversionFailure,
    OpValidationFailure,
)
from openvino.passes import LowLatency2, MakeStateful, Manager

from ovmstrio.core.datatypes import BY_OPENVINO_NAME
from ovmstrio.core.errors import AlreadyExists, ConfigError, Problem
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.core.texts import text_of
from ovmstrio.openvino.reading import read_onnx_content
from ovmstrio.openvino.signature import dims_of

__all__ = ["Conversion", "Converted", "convert", "detect_state", "framework_of", "new_folder", "new_version", "save"]

_FRAMEWORK_BY_SUFFIX: Final = {
    ".xml": "OpenVINO IR",
    ".onnx": "ONNX",
    ".pb": "TensorFlow frozen graph",
    ".tflite": "TensorFlow Lite",
    ".pdmodel": "PaddlePaddle",
    ".pt2": "PyTorch export",
}

_FRONTENDS: Final = {
    "OpenVINO IR": "ir",
    "ONNX": "onnx",
    "TensorFlow frozen graph": "tf",
    "TensorFlow SavedModel": "tf",
    "TensorFlow Lite": "tflite",
    "PaddlePaddle": "paddle",
    "PyTorch export": "pytorch",
}

_ELSEWHERE: Final = {
    ".pt": "save it with torch.export.save(torch.export.export(module, inputs), 'model.pt2')",
    ".pth": "load the weights in PyTorch and save torch.export.export(module, inputs) as .pt2",
    ".h5": "load it in Keras and write model.export('saved_model')",
    ".keras": "load it in Keras and write model.export('saved_model')",
    ".gguf": "OpenVINO itself does not read GGUF; OpenVINO GenAI does",
    ".bin": "give the .xml beside it",
    ".pdiparams": "give the .pdmodel beside it",
}

_READING_FAILED: Final = (
    RuntimeError,
    GeneralFailure,
    InitializationFailure,
    NotImplementedFailure,
    OpValidationFailure,
)
_NOISE: Final = re.compile(
    r"^(Exception from |Check '.*' failed at |While validating |FrontEnd API failed|Model wasn't fully|Summary:|$)"
)
_STATE_WORDS: Final = re.compile(r"(?i)(^|[_./])(state|hidden|cell|cache|mem|memory|past|kv|h|c)")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is asked of a conversion.

    ``state`` maps inputs to the outputs that hold their next value; with ``stateful`` and no pairs they are found by
    name and shape.  ``fp16`` stores the weights in half precision.
    """

    fp16: bool = False
    stateful: bool = False
    low_latency: bool = False
    state: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Converted:
    """What came out: where it lies and how it is called; ``state`` holds the pairs that became variables."""

    directory: Path
    framework: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: Mapping[str, str]


def _problem(source: Path, message: str, suggestion: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=str(source), suggestion=suggestion)])


def framework_of(source: Path) -> str:
    """Name the framework that wrote ``source``, by its suffix or, for a folder, by what lies in it.

    Raises:
        ConfigError: nothing is there, or nothing that OpenVINO reads.
    """
    if not source.exists():
        raise _problem(source, "no such file or folder")
    if source.is_dir():
        if (source / "saved_model.pb").is_file():
            return "TensorFlow SavedModel"
        raise _problem(source, "the folder holds no saved_model.pb", "give the model file itself")
    suffix = source.suffix.lower()
    if suffix not in _FRAMEWORK_BY_SUFFIX:
        known = ", ".join(_FRAMEWORK_BY_SUFFIX)
        way_out = _ELSEWHERE.get(suffix, f"known are {known} and TensorFlow SavedModel folders")
        raise _problem(source, f"files of the kind {suffix or '(no suffix)'} cannot be read", way_out)
    for partner in {".xml": (".bin",), ".pdmodel": (".pdiparams",)}.get(suffix, ()):
        if not source.with_suffix(partner).is_file():
            raise _problem(source, f"the weights {source.with_suffix(partner).name} are missing beside it")
    return _FRAMEWORK_BY_SUFFIX[suffix]


def _reason(error: Exception) -> str:
    """Take OpenVINO's own sentence out of the places in its source code that surround it."""
    lines = [line.strip() for line in text_of(error).splitlines()]
    kept = [line.removeprefix("-- ") for line in lines if not _NOISE.match(line)]
    return " ".join(kept or lines)[:600]


def _read(source: Path, framework: str) -> ov.Model:
    """Read with the framework's own frontend: asked for any, OpenVINO lets all of them try and complain."""
    readable: Any = _torch_program(source) if framework == "PyTorch export" else str(source)
    try:
        frontend = FrontEndManager().load_by_framework(_FRONTENDS[framework])
        return frontend.convert(frontend.load(readable))
    except OpConversionFailure as error:
        model = read_onnx_content(source)
        if model is not None:
            return model
        raise _problem(source, f"OpenVINO cannot convert all of it: {_reason(error)}") from error
    except _READING_FAILED as error:
        raise _problem(source, f"cannot be read as {framework}: {_reason(error)}", "is the file complete?") from error


def _torch_program(source: Path) -> Any:
    missing = [name for name in ("torch", "packaging") if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise _problem(
            source, f"reading a PyTorch export needs {needed}", f"pip install {' '.join(missing)}, or use ONNX"
        )
    torch: Any = importlib.import_module("torch.export")
    decoders: Any = importlib.import_module("openvino.frontend.pytorch.fx_decoder")
    try:
        program = torch.load(str(source))
    except (RuntimeError, ValueError, LookupError, OSError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise _problem(
            source, f"torch cannot read it: {text_of(error)}", "write it with torch.export.save()"
        ) from error
    return decoders.TorchFXPythonDecoder.from_exported_program(program)


def _spec(port: Any, position: int, kind: str) -> TensorSpec:
    name = min(port.get_names(), default=f"{kind}_{position}")
    datatype = BY_OPENVINO_NAME[port.get_element_type().get_type_name()]
    return TensorSpec(name, datatype, dims_of(port.get_partial_shape(), ()))


def _specs(ports: Sequence[Any], kind: str) -> tuple[TensorSpec, ...]:
    return tuple(_spec(port, position, kind) for position, port in enumerate(ports))


def _next_names(name: str) -> list[str]:
    """List the names that exporters give to the next value of the state ``name``."""
    names = [f"{name}{end}" for end in ("n", "N", "_n", "_next", "_new", "_out", ".1")]
    names += [f"{start}{name}" for start in ("next_", "new_", "out_", "present_")]
    names += [name.replace(old, new) for old, new in (("past", "present"), ("prev", "next")) if old in name]
    if name.endswith("_in") and _STATE_WORDS.search(name):
        names.append(f"{name.removesuffix('_in')}_out")
    return names


def detect_state(model: ov.Model) -> dict[str, str]:
    """Pair inputs with the outputs that hold their next value, by name, element type and shape."""
    outputs = {name: port for port in model.outputs for name in port.get_names()}
    pairs: dict[str, str] = {}
    for port in model.inputs:
        for name in sorted(port.get_names()):
            for candidate in _next_names(name):
                other = outputs.get(candidate)
                if (
                    other is not None
                    and other.get_element_type() == port.get_element_type()
                    and other.get_partial_shape().compatible(port.get_partial_shape())
                ):
                    pairs.setdefault(name, candidate)
    return pairs


def _check_pairs(source: Path, model: ov.Model, pairs: Mapping[str, str]) -> None:
    inputs = {name: port for port in model.inputs for name in port.get_names()}
    outputs = {name for port in model.outputs for name in port.get_names()}
    listing = f"its inputs are {sorted(inputs)}, its outputs {sorted(outputs)}"
    if not pairs:
        raise _problem(source, f"no input looks like the state of an output: {listing}", "name them: --state in=out")
    for name, successor in pairs.items():
        for side, known, wanted in (("input", inputs, name), ("output", outputs, successor)):
            if wanted not in known:
                raise _problem(source, f"the model has no {side} {wanted!r}: {listing}")
        shape = inputs[name].get_partial_shape()
        if shape.rank.is_static and len(shape) and shape[0].is_dynamic:
            message = f"the state {name!r} has no fixed batch size ({shape}), so it has no initial value"
            raise _problem(source, message, "export the model with a fixed batch, or let clients carry the state")


def _transform(source: Path, model: ov.Model, wanted: Conversion) -> dict[str, str]:
    """Apply the transformations asked for; give the pairs that became variables."""
    pairs: dict[str, str] = {}
    manager = Manager()
    if wanted.stateful or wanted.state:
        pairs = dict(wanted.state) or detect_state(model)
        _check_pairs(source, model, pairs)
        manager.register_pass(MakeStateful(pairs))
    if wanted.low_latency:
        manager.register_pass(LowLatency2())
    try:
        manager.run_passes(model)
    except RuntimeError as error:
        raise _problem(source, f"OpenVINO cannot make it stateful: {_reason(error)}") from error
    if wanted.low_latency and not model.get_sinks():
        message = "low latency keeps the state of TensorIterator and Loop operations, and the model has none"
        raise _problem(source, message, "leave out --low_latency")
    return pairs


def _refuse_existing(target: Path, another: str, *, force: bool) -> None:
    if target.exists() and not force:
        raise AlreadyExists(f"{target} exists; choose another {another}, or replace it with --force")


@contextmanager
def new_folder(target: Path, *, force: bool = False, another: str = "--repository") -> Iterator[Path]:
    """Give a folder to fill, which becomes ``target`` when the block ends without error.

    A server that watches the repository never sees it half-written.

    Raises:
        AlreadyExists: it exists and ``force`` is not set; ``another`` is the option that leads elsewhere.
    """
    _refuse_existing(target, another, force=force)
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


@contextmanager
def new_version(repository: Path, name: str, version: int = 1, *, force: bool = False) -> Iterator[Path]:
    """Give a folder to fill, which becomes ``<repository>/<name>/<version>``; as :func:`new_folder` otherwise."""
    target = repository / name / str(version)
    try:
        with new_folder(target, force=force, another="--version") as made:
            yield made
    finally:
        if target.parent.is_dir() and not any(target.parent.iterdir()):
            target.parent.rmdir()


def save(model: ov.Model, directory: Path, *, fp16: bool = False) -> None:
    """Write ``model.xml`` and ``model.bin`` into ``directory``."""
    ov.save_model(model, directory / "model.xml", compress_to_fp16=fp16)


def convert(
    source: Path,
    repository: Path,
    name: str,
    version: int = 1,
    *,
    wanted: Conversion | None = None,
    force: bool = False,
) -> Converted:
    """Convert ``source`` into ``<repository>/<name>/<version>/model.xml`` and ``model.bin``.

    Raises:
        ConfigError: the source cannot be read, or not be transformed as asked; the message names the way out.
        AlreadyExists: the version exists and ``force`` is not set.
    """
    wanted = wanted or Conversion()
    target = repository / name / str(version)
    framework = framework_of(source)
    _refuse_existing(target, "--version", force=force)
    model = _read(source, framework)
    if not model.outputs:
        # An empty file is a whole model to some readers, and nothing could be served of it.
        raise _problem(source, f"as {framework} it is a model without outputs", "is the file complete?")
    state = _transform(source, model, wanted)
    with new_version(repository, name, version, force=force) as directory:
        save(model, directory, fp16=wanted.fp16)
    inputs, outputs = _specs(model.inputs, "input"), _specs(model.outputs, "out")
    return Converted(target, framework, inputs, outputs, state)
