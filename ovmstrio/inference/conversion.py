"""Conversion of models of other frameworks to a repository version that is known to load.

::

    file or folder ─> find_models ─> read ─> describe inputs ─> quantize ─> make stateful ─> new_version
                                                                                                 │
                                                                                 loaded as a server would

Only PyTorch models need their framework installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino.frontend import FrontEndManager, OpConversionFailure
from openvino.passes import LowLatency2, MakeStateful, Manager

from ovmstrio.config.shapes import parse_shape
from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import NO_MAPPING
from ovmstrio.core.errors import AlreadyExists, ConfigError, Problem
from ovmstrio.core.tensor import BY_NAME, BY_OPENVINO_NAME, Array, Datatype, Dim, TensorSpec
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.model_readers import PADDLE_PROGRAM, check_model_files, read_onnx_content, read_paddle
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.signature import model_specs, port_names, read_signature, to_partial_shape
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.regular_files import open_regular
from ovmstrio.util.truncation import text_of

# ----------------------------------------------------------------------
# Sources: framework detection, and discovery of several models in a folder
# ----------------------------------------------------------------------

TORCH_EXPORT: Final = "PyTorch export"
TORCHSCRIPT: Final = "TorchScript"

_EXPORT_HINT: Final = (
    "load the weights into their module and write torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
)
_EXPORT_ENTRIES: Final = ("archive_format", "serialized_exported_program.json")
_TRACED: Final = "traced_inputs.pkl"


def detect_torch_framework(source: Path) -> str:
    """Return the kind of a PyTorch file by its content; raise ConfigError if it has weights but no program."""
    inner = _entries(source)
    if inner & {*_EXPORT_ENTRIES}:
        return TORCH_EXPORT
    if any(entry.startswith("code/") for entry in inner):
        return TORCHSCRIPT
    message = "has pickled PyTorch objects, such as weights, but no program"
    raise ConfigError([Problem(message, file=str(source), suggestion=_EXPORT_HINT)])


def is_traced(source: Path) -> bool:
    """Return whether a TorchScript file contains the inputs that it was traced with."""
    return _TRACED in _entries(source)


def _entries(source: Path) -> set[str]:
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        message = f"not a PyTorch program file: {error}"
        raise ConfigError([Problem(message, file=str(source), suggestion=_EXPORT_HINT)]) from error
    return {entry.partition("/")[2] for entry in entries} | set(entries)


_FRAMEWORK_BY_SUFFIX: Final = {
    ".xml": "OpenVINO IR",
    ".onnx": "ONNX",
    ".pb": "TensorFlow frozen graph",
    ".tflite": "TensorFlow Lite",
    ".pdmodel": "PaddlePaddle",
}
_TORCH: Final = (".pt2", ".pt")
_SAVED_MODEL: Final = "saved_model.pb"

_HINTS: Final = {
    ".pth": "load the weights in PyTorch and save torch.export.export(module, inputs) as .pt2",
    ".h5": "load it in Keras and write model.export('saved_model')",
    ".keras": "load it in Keras and write model.export('saved_model')",
    ".gguf": "OpenVINO itself does not read GGUF; OpenVINO GenAI does",
    ".bin": "use the .xml in the same folder",
    ".pdiparams": "use the .pdmodel in the same folder",
}
_PARTNERS: Final = {".xml": ".bin", ".pdmodel": ".pdiparams"}
_GENERIC_NAMES: Final = {"model", "inference", "openvino_model", "frozen_inference_graph"}
_HEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model file or folder, with the name to serve it under."""

    path: Path
    name: str


def conversion_error(source: Path, message: str, suggestion: str = "") -> ConfigError:
    """Return the error of a source that cannot be converted."""
    return ConfigError([Problem(message, file=str(source), suggestion=suggestion)])


def detect_framework(source: Path) -> str:
    """Return the framework of a file (by suffix) or folder (by content); raise ConfigError if it is not supported."""
    if not source.exists():
        raise conversion_error(source, "no such file or folder")
    if source.is_dir():
        if (source / _SAVED_MODEL).is_file():
            return "TensorFlow SavedModel"
        if _is_paddle(source, _names_in(source)):
            return "PaddlePaddle"
        raise conversion_error(source, f"the folder is not a model: it has no {_SAVED_MODEL} and no {PADDLE_PROGRAM}")
    if source.name == PADDLE_PROGRAM:
        return "PaddlePaddle"
    suffix = source.suffix.lower()
    if suffix in _TORCH:
        return detect_torch_framework(source)
    if suffix not in _FRAMEWORK_BY_SUFFIX:
        known = ", ".join([*_FRAMEWORK_BY_SUFFIX, *_TORCH])
        hint = _HINTS.get(suffix, f"known are {known}, and folders of TensorFlow (SavedModel) and Paddle")
        raise conversion_error(source, f"unsupported file type {suffix or '(no suffix)'}", hint)
    partner = source.with_suffix(_PARTNERS.get(suffix, suffix))
    if not partner.is_file():
        raise conversion_error(source, f"the weights {partner.name} are missing")
    return _FRAMEWORK_BY_SUFFIX[suffix]


def find_models(source: Path) -> tuple[ModelSource, ...]:
    """Find the models at a path: the file or folder itself, or all models in the folder, sorted by path.

    A model is named after its file or, for generic names (``inference.pdmodel``), its folder; on conflict, after both.
    Hidden files and folders are skipped.

    Raises:
        ConfigError: there is no model, or two have the same name.
    """
    if not source.is_dir() or _is_model(source, _names_in(source)):
        return (ModelSource(source, _valid_name(source.resolve().stem)),)
    paths = list(_walk(source))
    if not paths:
        known = ", ".join([*_FRAMEWORK_BY_SUFFIX, *_TORCH])
        hint = f"known are {known}, and folders of TensorFlow (SavedModel) and Paddle"
        raise conversion_error(source, "no model found in the folder", hint)
    return tuple(ModelSource(*pair) for pair in zip(paths, _names(source, paths), strict=True))


def _is_paddle(folder: Path, names: Sequence[str]) -> bool:
    """Return whether a folder is a Paddle model other than a ``.pdmodel``; the reader reports incomplete ones."""
    alone = (name for name in names if name.endswith(".pdiparams"))
    return PADDLE_PROGRAM in names or any(not (folder / name).with_suffix(".pdmodel").exists() for name in alone)


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _is_model(folder: Path, names: Sequence[str]) -> bool:
    return _SAVED_MODEL in names or _is_paddle(folder, names)


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if _is_model(here, files):
            folders.clear()
            yield here
        else:
            yield from (here / name for name in sorted(files) if _is_model_file(here / name))


def _is_model_file(file: Path) -> bool:
    suffix = file.suffix.lower()
    if file.name.startswith(".") or suffix not in {*_FRAMEWORK_BY_SUFFIX, *_TORCH}:
        return False
    if suffix != ".xml":
        return True
    with open_regular(file) as opened:  # other XML files are common
        return b"<net" in opened.read(_HEAD_BYTES)


def _names(root: Path, paths: Sequence[Path]) -> list[str]:
    short = [
        _valid_name(
            path.stem if path.is_file() and path.stem.lower() not in _GENERIC_NAMES else _folder_name(root, path)
        )
        for path in paths
    ]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else _valid_name(f"{path.parent.resolve().name}_{path.stem}")
        for name, path in zip(short, paths, strict=True)
    ]
    problems = []
    for name, count in Counter(names).items():
        if count > 1:
            same = [str(path) for path, other in zip(paths, names, strict=True) if other == name]
            message = f"several models have the name {name!r}: {', '.join(same)}"
            problems.append(Problem(message, file=str(root), suggestion="prepare them one by one, with --name"))
    if problems:
        raise ConfigError(problems)
    return names


def _folder_name(root: Path, path: Path) -> str:
    """Return the name of a model's folder, skipping version folders."""
    folder = path if path.is_dir() else path.parent
    while folder.name.isdigit() and folder != root:
        folder = folder.parent
    return folder.resolve().name


def _valid_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip(".+-") or "model"


# ----------------------------------------------------------------------
# Inputs and state that the user specifies
# ----------------------------------------------------------------------

_FORM: Final = re.compile(r"(?P<name>.+?)=(?P<type>[A-Za-z0-9]*)\s*[\[(](?P<dims>[^\])]*)[\])]")
_EXAMPLE: Final = "NAME=TYPE[SIZES] such as image=FP32[-1,3,224,224], with -1 for any size"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape of an input, and its type if specified."""

    shape: tuple[Dim, ...]
    datatype: Datatype | None = None


def parse_input_form(text: str) -> tuple[str, InputSpec]:
    """Parse ``image=FP32[-1,3,224,224]``, in which the type is optional; ConfigError if malformed."""
    matched = _FORM.fullmatch(text.strip())
    if matched is None:
        raise ConfigError([Problem(f"--input: expected {_EXAMPLE}, got {text!r}")])
    datatype = BY_NAME.get(matched["type"].upper())
    if matched["type"] and datatype is None:
        known = ", ".join(BY_NAME)
        raise ConfigError([Problem(f"--input: unknown element type {matched['type']!r}; known are {known}")])
    dims = parse_shape("--input", f"({matched['dims']})").dims
    return matched["name"], InputSpec(dims or (), datatype)


def apply_input_specs(source: Path, model: ov.Model, forms: Mapping[str, InputSpec]) -> None:
    """Set types and shapes of inputs; raise ConfigError if an input is unknown, incompatible or incomplete."""
    names = port_names(model.inputs, {}, is_input=True)
    _refuse_unknown(source, names, list(forms))
    for name, port in zip(names, model.inputs, strict=True):
        form = forms.get(name)
        if form is None:
            continue
        node, type_name = port.get_node(), port.get_element_type().get_type_name()
        if form.datatype is not None and type_name not in {"dynamic", form.datatype.openvino}:
            own = BY_OPENVINO_NAME[type_name].name if type_name in BY_OPENVINO_NAME else type_name
            raise conversion_error(source, f"input {name!r} is {own}, not {form.datatype.name}", "leave the type out")
        if form.datatype is not None:
            node.set_element_type(getattr(ov.Type, form.datatype.openvino))
        if not port.get_partial_shape().compatible(to_partial_shape(form.shape)):
            shapes = f"{port.get_partial_shape()}, not {to_partial_shape(form.shape)}"
            raise conversion_error(source, f"input {name!r} has the shape {shapes}")
        node.set_partial_shape(to_partial_shape(form.shape))
    try:
        model.validate_nodes_and_infer_types()
    except OPENVINO_ERRORS as error:
        raise conversion_error(
            source, f"the model does not accept these inputs: {openvino_error_message(error)}"
        ) from error
    _refuse_formless(source, names, model)


def _refuse_unknown(source: Path, names: Sequence[str], given: Sequence[str]) -> None:
    problems = []
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, 1)
            known = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
            problems.append(Problem(f"the model has no input {name!r}", file=str(source), suggestion=known))
    if problems:
        raise ConfigError(problems)


def _refuse_formless(source: Path, names: Sequence[str], model: ov.Model) -> None:
    formless = [
        name
        for name, port in zip(names, model.inputs, strict=True)
        if port.get_partial_shape().rank.is_dynamic or port.get_element_type().is_dynamic()
    ]
    if formless:
        listed = ", ".join(map(repr, formless))
        options = " ".join(f"--input '{name}=FP32[-1,...]'" for name in formless)
        raise conversion_error(source, f"the file has no type or no rank for {listed}", f"specify {options}")


_STATE_WORDS: Final = re.compile(r"(?i)(^|[_./])(state|hidden|cell|cache|mem|memory|past|kv|h|c)")


def make_stateful(
    source: Path, model: ov.Model, *, pairs: Mapping[str, str] | None, low_latency: bool
) -> dict[str, str]:
    """Turn state inputs into variables; return the (input, output) pairs.

    ``pairs`` maps inputs to the outputs with their next value; empty to detect them, None for no variables.
    ``low_latency`` keeps the state of loops.

    Raises:
        ConfigError: there is no state, or it cannot become a variable.
    """
    made: dict[str, str] = {}
    manager = Manager()
    if pairs is not None:
        made = dict(pairs) or detect_state(model)
        _check_pairs(source, model, made)
        manager.register_pass(MakeStateful(made))
    if low_latency:
        manager.register_pass(LowLatency2())
    try:
        manager.run_passes(model)
    except OPENVINO_ERRORS as error:
        raise conversion_error(source, f"OpenVINO cannot make it stateful: {openvino_error_message(error)}") from error
    if low_latency and not model.get_sinks():
        message = "--low-latency requires TensorIterator or Loop operations, and the model has none"
        raise conversion_error(source, message, "leave out --low-latency")
    return made


def _next_names(name: str) -> list[str]:
    names = [f"{name}{end}" for end in ("n", "N", "_n", "_next", "_new", "_out", ".1")]
    names += [f"{start}{name}" for start in ("next_", "new_", "out_", "present_")]
    names += [name.replace(old, new) for old, new in (("past", "present"), ("prev", "next")) if old in name]
    if name.endswith("_in") and _STATE_WORDS.search(name):
        names.append(f"{name.removesuffix('_in')}_out")
    return names


def detect_state(model: ov.Model) -> dict[str, str]:
    """Return inputs with the outputs of their next value, matched by name, element type and shape."""
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
        raise conversion_error(source, f"no state inputs found: {listing}", "name them: --state in=out")
    for name, successor in pairs.items():
        for side, known, wanted in (("input", inputs, name), ("output", outputs, successor)):
            if wanted not in known:
                raise conversion_error(source, f"the model has no {side} {wanted!r}: {listing}")
        shape = inputs[name].get_partial_shape()
        if shape.rank.is_static and len(shape) and shape[0].is_dynamic:
            message = f"the state {name!r} has no fixed batch size ({shape}), and thus no initial value"
            raise conversion_error(source, message, "export the model with a fixed batch, or keep the state in clients")


# ----------------------------------------------------------------------
# Quantization to int8 with NNCF and calibration samples
# ----------------------------------------------------------------------

MAX_SAMPLES: Final = 300
"""Maximum number of samples, the first by name; more change little and take long."""

_ROOT: Final = "."
_UNSUPPORTED_TYPES: Final = frozenset({"BF16", "BYTES"})  # types that .npy files cannot hold without pickling


@dataclass(frozen=True, slots=True)
class CalibrationBatch:
    """One batch of one input: a file, or its rows from ``start`` to before ``end``."""

    file: Path
    start: int = 0
    end: int | None = None

    def read(self, spec: TensorSpec) -> Array:
        """Read the batch; raise ConfigError if the file cannot be read or has non-finite numbers."""
        rows = np.array(_open(self.file)[self.start : self.end] if self.end else _open(self.file))
        if rows.dtype.kind == "f" and not np.isfinite(rows).all():
            raise ConfigError([_problem(self.file, "has non-finite numbers", spec)])
        return np.ascontiguousarray(rows.astype(spec.datatype.numpy, copy=False))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Samples that fit ``inputs``: each has a batch for every input, in order."""

    inputs: tuple[TensorSpec, ...]
    samples: tuple[tuple[CalibrationBatch, ...], ...]

    def arrays(self, sample: Sequence[CalibrationBatch]) -> list[Array]:
        """Read one sample."""
        return [batch.read(spec) for batch, spec in zip(sample, self.inputs, strict=True)]


def read_calibration(folder: Path, inputs: Sequence[TensorSpec]) -> Calibration:
    """Find samples for all inputs, and check their file headers.

    Files of a single input are in ``folder`` or ``folder/<input>``, files of several inputs in ``folder/<input>``,
    where equal names form one sample. A file has the shape of its input, or several batches if the batch is fixed.

    Raises:
        ConfigError: there are no files, or some do not fit; lists all that do not.
    """
    problems = [
        Problem(f"input {spec.name!r} is {spec.datatype.name}, which .npy files do not support", str(folder))
        for spec in inputs
        if spec.datatype.name in _UNSUPPORTED_TYPES
    ]
    files = _files(folder, inputs, problems)
    samples: list[tuple[CalibrationBatch, ...]] = []
    for name in sorted(set().union(*files.values())):
        parts = [files[spec.name].get(name) for spec in inputs]
        batches = [_batches(file, spec, problems) for file, spec in zip(parts, inputs, strict=True) if file is not None]
        if None in parts:
            missing = ", ".join(spec.name for file, spec in zip(parts, inputs, strict=True) if file is None)
            problems.append(Problem(f"{name} is missing for {missing}", str(folder)))
        elif len({len(each) for each in batches if each}) > 1:
            problems.append(Problem(f"the files {name} have different numbers of batches", str(folder)))
        else:
            samples.extend(zip(*batches, strict=False))
    if problems:
        raise ConfigError(problems)
    return Calibration(tuple(inputs), tuple(samples[:MAX_SAMPLES]))


def _files(folder: Path, inputs: Sequence[TensorSpec], problems: list[Problem]) -> dict[str, dict[str, Path]]:
    names = [spec.name for spec in inputs]
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.rglob("*.npy")):
        place = file.parent.relative_to(folder).as_posix()
        found.setdefault(names[0] if place == _ROOT and len(names) == 1 else place, {})[file.name] = file
    for place in found.keys() - set(names):
        near = get_close_matches(place, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"a folder for each input: {', '.join(names)}"
        problems.append(Problem("folder with .npy files matches no input", str(folder / place), suggestion=hint))
    if not found:
        where = "there" if len(names) == 1 else f"in {', '.join(f'{folder}/{name}' for name in names)}"
        problems.append(Problem(f"no .npy files {where}", str(folder)))
    return {name: found.get(name, {}) for name in names}


def _open(file: Path) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError([Problem(f"cannot be read as .npy: {error}", str(file))]) from error
    return array


def _batches(file: Path, spec: TensorSpec, problems: list[Problem]) -> list[CalibrationBatch]:
    try:
        array = _open(file)
    except ConfigError as error:
        problems.extend(error.problems)
        return []
    if not np.can_cast(array.dtype, spec.datatype.numpy, "same_kind"):
        problems.append(_problem(file, f"has {array.dtype}", spec))
        return []
    if _fits(array.shape, spec):
        return [CalibrationBatch(file)]
    batch = spec.shape[0] if spec.shape else None
    if batch is not None and batch.is_fixed and _fits((batch.low, *array.shape[1:]), spec) and array.ndim:
        count, rest = divmod(array.shape[0], batch.low) if batch.low else (0, 1)
        if count and not rest:
            return [CalibrationBatch(file, start, start + batch.low) for start in range(0, array.shape[0], batch.low)]
    problems.append(_problem(file, f"has the shape [{','.join(map(str, array.shape))}]", spec))
    return []


def _fits(shape: Sequence[int], spec: TensorSpec) -> bool:
    return len(shape) == len(spec.shape) and all(
        size and dim.accepts(size) for size, dim in zip(shape, spec.shape, strict=True)
    )


def _problem(file: Path, message: str, spec: TensorSpec) -> Problem:
    return Problem(f"{message}; input {spec.name!r} is {spec}", str(file))


_QUANTIZED: Final = "FakeQuantize"


def quantize(source: Path, model: ov.Model, samples: Path) -> tuple[ov.Model, int]:
    """Quantize a model to int8 where the loss is small; return it and the number of samples. Blocks.

    Raises:
        ConfigError: NNCF is not installed, samples do not fit, or nothing can be quantized.
    """
    if importlib.util.find_spec("nncf") is None:
        raise conversion_error(source, "quantization needs nncf", install_command(Extra.QUANTIZE))
    if not model.inputs:
        raise conversion_error(source, "the model has no inputs to calibrate", "leave out --quantize")
    calibration = read_calibration(samples, model_specs(model.inputs, is_input=True))
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nncf: Any = importlib.import_module("nncf")
        nncf.set_log_level(logging.CRITICAL)
        dataset = nncf.Dataset(calibration.samples, calibration.arrays)
        try:
            quantized: ov.Model = nncf.quantize(model, dataset, subset_size=len(calibration.samples))
        except ConfigError:
            raise
        except Exception as error:
            # NNCF raises exceptions of any class for unsupported models.
            raise conversion_error(source, f"NNCF cannot quantize it: {text_of(error)}") from error
    if not any(node.get_type_name() == _QUANTIZED for node in quantized.get_ops()):
        raise conversion_error(source, "NNCF found nothing to quantize in the model", "leave out --quantize")
    return quantized, len(calibration.samples)


# ----------------------------------------------------------------------
# PyTorch programs; requires torch
# ----------------------------------------------------------------------

_NEEDED: Final = ("torch", "packaging")
_REWRITE: Final = "save the model with the installed torch version, by torch.export.save() or torch.jit.save()"


def read_torch(source: Path, framework: str) -> ov.Model:
    """Read a ``torch.export`` or TorchScript program; inputs are named after the arguments of ``forward``.

    TorchScript has input types and ranks only if it was traced.

    Raises:
        ConfigError: torch is not installed or cannot read the file, or OpenVINO cannot convert the program.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        message = f"reading {framework} needs {' and '.join(missing)}"
        raise conversion_error(source, message, f"{install_command(Extra.TORCH)}, or give the model as ONNX")
    with _quiet():
        program = _load(source, framework)
        try:
            model: ov.Model = ov.convert_model(program)
        except OPENVINO_ERRORS as error:
            raise conversion_error(
                source, f"OpenVINO cannot convert the model: {openvino_error_message(error)}"
            ) from error
        if framework == TORCH_EXPORT:
            _describe(model, _sizes(program))
        else:
            _describe(model, {str(argument.name): None for argument in program.forward.schema.arguments[1:]})
    return model


def _load(source: Path, framework: str) -> Any:
    torch: Any = importlib.import_module("torch")
    try:
        if framework == TORCH_EXPORT:
            with open_regular(source) as opened:  # by path, torch requires the suffix .pt2
                return importlib.import_module("torch.export").load(opened)
        return torch.jit.load(str(source), map_location="cpu", _restore_shapes=is_traced(source)).eval()
    except Exception as error:
        # A file of another version may raise any exception.
        first, _, _ = text_of(error).strip().partition("\n")
        raise conversion_error(
            source, f"torch cannot read the file: {type(error).__name__}: {first}", _REWRITE
        ) from error


def _sizes(program: Any) -> dict[str, list[int] | None]:
    """Return the inputs of an exported program with their shapes; -1 is a dynamic size."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    shapes: dict[str, list[int] | None] = {}
    for name in program.graph_signature.user_inputs:
        value = placeholders[name].meta.get("val") if name in placeholders else None
        shape = getattr(value, "shape", None)
        shapes[str(name)] = None if shape is None else [size if isinstance(size, int) else -1 for size in shape]
    return shapes


def _describe(model: ov.Model, inputs: Mapping[str, Sequence[int] | None]) -> None:
    if len(inputs) != len(model.inputs):
        return
    for port, (name, shape) in zip(model.inputs, inputs.items(), strict=True):
        port.set_names({name})
        node = port.get_node()
        node.set_friendly_name(name)
        if shape is not None:
            node.set_partial_shape(ov.PartialShape(list(shape)))
    model.validate_nodes_and_infer_types()


@contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# ----------------------------------------------------------------------
# Conversion into a version folder
# ----------------------------------------------------------------------

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


def _size_of(source: Path) -> int:
    """Return the bytes of a model file and its weights, or of a folder."""
    files = source.rglob("*") if source.is_dir() else {source, *source.parent.glob(f"{escape(source.stem)}.*")}
    return sum(file.stat().st_size for file in files if file.is_file())


def convert(
    source: Path,
    repository: Path,
    name: str,
    version: int = 1,
    *,
    wanted: Conversion | None = None,
    force: bool = False,
    begin_step: Callable[[str], None] = lambda _: None,
) -> Converted:
    """Convert ``source`` into ``<repository>/<name>/<version>/model.xml`` and ``model.bin``, and load it once.

    ``begin_step`` is called with the name of each step: reading, quantization, writing, compilation.

    Raises:
        ConfigError: the model cannot be read, transformed or loaded; nothing is written.
        AlreadyExists: the version exists and ``force`` is not set.
    """
    wanted = wanted or Conversion()
    target = repository / name / str(version)
    framework = detect_framework(source)
    check_not_existing(target, "--version", force=force)
    begin_step(f"reading {framework}, {_size_of(source) / 10**6:.1f} MB")
    model = read_source(source, framework)
    apply_input_specs(source, model, wanted.inputs)
    read_signature(model, NO_MAPPING, str(source))  # rejects unsupported tensors
    samples = 0
    if wanted.calibration is not None:
        begin_step("quantizing")
        model, samples = quantize(source, model, wanted.calibration)
    pairs = wanted.state if wanted.stateful or wanted.state else None
    state = make_stateful(source, model, pairs=pairs, low_latency=wanted.low_latency)
    inputs, outputs = model_specs(model.inputs, is_input=True), model_specs(model.outputs, is_input=False)
    with new_version(repository, name, version, force=force) as directory:
        begin_step("writing")
        save(model, directory, fp16=wanted.fp16)
        begin_step("compiling")
        try:
            compile_model(ModelFile(directory / _MODEL, ModelSpec(name=name, base_path=directory.parent)))
        except ConfigError as error:
            raise ConfigError([replace(problem, file=str(source)) for problem in error.problems]) from error
    return Converted(target, framework, inputs, outputs, state, samples)
