"""Samples of a model's inputs in ``.npy`` files, from which quantization learns which values occur."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import numpy as np

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Array, TensorSpec

__all__ = ["MOST_SAMPLES", "Calibration", "CalibrationBatch", "read_calibration"]

MOST_SAMPLES: Final = 300
"""How many samples are used, the first ones by name: more change little and take long."""

_ROOT: Final = "."
_NOT_OF_NUMPY: Final = frozenset({"BF16", "BYTES"})
"""Types of which numpy writes no files that it reads again without unpickling."""


@dataclass(frozen=True, slots=True)
class CalibrationBatch:
    """One batch of one input: a file, or its rows from ``start`` to before ``end``."""

    file: Path
    start: int = 0
    end: int | None = None

    def read(self, spec: TensorSpec) -> Array:
        """Read the batch, of the type of its input.

        Raises:
            ConfigError: the file cannot be read, or holds numbers that are not finite.
        """
        rows = np.array(_open(self.file)[self.start : self.end] if self.end else _open(self.file))
        if rows.dtype.kind == "f" and not np.isfinite(rows).all():
            raise ConfigError([_problem(self.file, "holds numbers that are not finite", spec)])
        return np.ascontiguousarray(rows.astype(spec.datatype.numpy, copy=False))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Samples that were found to fit ``inputs``, each a batch for every input in their order."""

    inputs: tuple[TensorSpec, ...]
    samples: tuple[tuple[CalibrationBatch, ...], ...]

    def arrays(self, sample: Sequence[CalibrationBatch]) -> list[Array]:
        """Read one sample, as :meth:`CalibrationBatch.read` does."""
        return [batch.read(spec) for batch, spec in zip(sample, self.inputs, strict=True)]


def read_calibration(folder: Path, inputs: Sequence[TensorSpec]) -> Calibration:
    """Find samples for all inputs, and check by the heads of their files that they fit.

    Files of the only input lie in ``folder`` or in ``folder/<input>``; those of several in ``folder/<input>`` each,
    where equal names make one sample.  A file has the shape of its input; where that has a fixed batch, it may hold
    several batches.

    Raises:
        ConfigError: there are no files, or some do not fit; lists all that do not.
    """
    problems = [
        Problem(f"input {spec.name!r} has elements of {spec.datatype.name}, which numpy's files have not", str(folder))
        for spec in inputs
        if spec.datatype.name in _NOT_OF_NUMPY
    ]
    files = _files(folder, inputs, problems)
    samples: list[tuple[CalibrationBatch, ...]] = []
    for name in sorted(set().union(*files.values())):
        beside = [files[spec.name].get(name) for spec in inputs]
        batches = [
            _batches(file, spec, problems) for file, spec in zip(beside, inputs, strict=True) if file is not None
        ]
        if None in beside:
            lacking = ", ".join(spec.name for file, spec in zip(beside, inputs, strict=True) if file is None)
            problems.append(Problem(f"{name} is there without that of {lacking}", str(folder)))
        elif len({len(each) for each in batches if each}) > 1:
            problems.append(Problem(f"the files called {name} hold different numbers of batches", str(folder)))
        else:
            samples.extend(zip(*batches, strict=False))
    if problems:
        raise ConfigError(problems)
    return Calibration(tuple(inputs), tuple(samples[:MOST_SAMPLES]))


def _files(folder: Path, inputs: Sequence[TensorSpec], problems: list[Problem]) -> dict[str, dict[str, Path]]:
    """Give the files of each input by their names."""
    names = [spec.name for spec in inputs]
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.rglob("*.npy")):
        place = file.parent.relative_to(folder).as_posix()
        found.setdefault(names[0] if place == _ROOT and len(names) == 1 else place, {})[file.name] = file
    for place in found.keys() - set(names):
        near = get_close_matches(place, names, 1)
        way_out = f"did you mean {near[0]}?" if near else f"a folder for each input: {', '.join(names)}"
        problems.append(
            Problem("holds .npy files, and is called like no input", str(folder / place), suggestion=way_out)
        )
    if not found:
        where = "there" if len(names) == 1 else f"in {', '.join(f'{folder}/{name}' for name in names)}"
        problems.append(Problem(f"no .npy files lie {where}", str(folder)))
    return {name: found.get(name, {}) for name in names}


def _open(file: Path) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError([Problem(f"cannot be read as .npy: {error}", str(file))]) from error
    return array


def _batches(file: Path, spec: TensorSpec, problems: list[Problem]) -> list[CalibrationBatch]:
    """Give the batches in a file, none if it does not fit."""
    try:
        array = _open(file)
    except ConfigError as error:
        problems.extend(error.problems)
        return []
    if not np.can_cast(array.dtype, spec.datatype.numpy, "same_kind"):
        problems.append(_problem(file, f"holds {array.dtype}", spec))
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
