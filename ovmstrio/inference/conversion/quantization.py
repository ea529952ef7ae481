"""Quantization to int8 with NNCF and calibration samples."""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Array, TensorSpec
from ovmstrio.inference.conversion.sources import conversion_error
from ovmstrio.inference.signature import model_specs
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.truncation import text_of

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
        raise conversion_error(source, "quantization needs nncf", way_to_install(Extra.QUANTIZE))
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
