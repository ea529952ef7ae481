"""Steps of a sequence: arrays cut into parts along an axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ovmstrio.cli.problems import count
from ovmstrio.cli.tensor_files import read_inputs
from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ovmstrio.client import TensorInfo
    from ovmstrio.core.tensor import Array


class WrongOption(Exception):
    """An option does not fit the model or the data."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """Options for cutting arrays.

    Attributes:
        size: length of a part; None for the size of the model's input.
        axis: axis of the model's input; negative values count from the end.
        pad: True pads a short last part, False drops it, None pads it if the input has a fixed size.
        whole: names of inputs that are never cut.
    """

    size: int | None = None
    axis: int = 0
    pad: bool | None = None
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Steps:
    """Inputs of each step.

    Attributes:
        cut: arrays that are cut, all of the same length along their axes.
        axes: axes of the arrays that are cut.
        whole: arrays that each step sends completely.
        size: length of a part.
        total: number of steps.
        padded: whether a short last part is padded.
    """

    cut: Mapping[str, Array]
    axes: Mapping[str, int]
    whole: Mapping[str, Array]
    size: int
    total: int
    padded: bool

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for number in range(self.total):
            parts = {name: self._part(name, number) for name in self.cut}
            yield {**self.whole, **parts}

    def _part(self, name: str, number: int) -> Array:
        array, axis = self.cut[name], self.axes[name]
        begin = number * self.size
        part = array[(slice(None),) * axis + (slice(begin, begin + self.size),)]
        missing = self.size - part.shape[axis]
        if not missing or not self.padded:
            return part
        shape = (*part.shape[:axis], missing, *part.shape[axis + 1 :])
        filling = np.full(shape, b"", object) if part.dtype.hasobject else np.zeros(shape, part.dtype)
        return np.concatenate([part, filling], axis)


def plan(given: Sequence[str], expected: Sequence[TensorInfo], cutting: Cutting, note: Callable[[str], None]) -> Steps:
    """Read the inputs and plan the steps; report conversions and the cut and uncut inputs to ``note``.

    Raises:
        WrongOption: the axis, the size or a name does not fit the model, or there is nothing to send.
        InvalidRequest: a file cannot be parsed, or does not fit the input.
        OSError: a file cannot be read.
    """
    axes = _axes(expected, cutting)
    arrays = read_inputs(given, [_open(tensor, axes.get(tensor.name)) for tensor in expected], note)
    lengths = {name: arrays[name].shape[axis] for name, axis in axes.items()}
    longest = max(lengths.values())
    cut = {name: arrays[name] for name, length in lengths.items() if length == longest}
    known = {tensor.name: tensor for tensor in expected}
    whole = {name: array for name, array in arrays.items() if name not in cut}
    _check_whole(whole, known)
    takes = {name: known[name].shape[axes[name]] for name in cut}
    size = _size(takes, cutting)
    padded = cutting.pad is not False and (cutting.pad is True or any(each != -1 for each in takes.values()))
    total = longest // size if cutting.pad is False else -(-longest // size)
    if not total:
        raise WrongOption(f"{', '.join(cut)}: the length of {longest} along the axis is shorter than a part of {size}")
    steps = Steps(cut, {name: axes[name] for name in cut}, whole, size, total, padded)
    _tell(steps, longest, note)
    return steps


def _axes(expected: Sequence[TensorInfo], cutting: Cutting) -> dict[str, int]:
    """Find the axis of every input that may be cut."""
    strangers = sorted(cutting.whole - {tensor.name for tensor in expected})
    if strangers:
        names = ", ".join(tensor.name for tensor in expected)
        raise WrongOption(f"--whole {strangers[0]}: unknown input; the model takes {names}")
    candidates = [tensor for tensor in expected if tensor.name not in cutting.whole]
    if not candidates:
        raise WrongOption("--whole names every input, so no input can be cut")
    axes = {
        tensor.name: range(len(tensor.shape))[cutting.axis]
        for tensor in candidates
        if -len(tensor.shape) <= cutting.axis < len(tensor.shape)
    }
    if not axes:
        shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in candidates)
        raise WrongOption(f"--axis {cutting.axis} is out of range: the model takes {shapes}")
    return axes


def _open(tensor: TensorInfo, axis: int | None) -> TensorInfo:
    """Make the length of an input along the axis dynamic."""
    if axis is None:
        return tensor
    return replace(tensor, shape=(*tensor.shape[:axis], -1, *tensor.shape[axis + 1 :]))


def _check_whole(whole: Mapping[str, Array], known: Mapping[str, TensorInfo]) -> None:
    for name, array in whole.items():
        wanted = known[name].shape
        if any(each not in {-1, size} for each, size in zip(wanted, array.shape, strict=True)):
            expected = f"{known[name].datatype} {list(wanted)}"
            raise InvalidRequest(
                f'input "{name}" is not the longest along the axis and is sent completely: expected {expected}, '
                f"got {list(array.shape)}"
            )


def _size(takes: Mapping[str, int], cutting: Cutting) -> int:
    """Return the length of a part, which must fit every input that is cut."""
    fixed = [(name, size) for name, size in takes.items() if size != -1]
    size = cutting.size or (fixed[0][1] if fixed else 0)
    if not size:
        raise WrongOption(f"{', '.join(takes)}: the length along axis {cutting.axis} is dynamic; set it with --chunk")
    for name, taken in fixed:
        if taken != size:
            raise WrongOption(f'input "{name}": expected {taken} along axis {cutting.axis}, got {size}')
    return size


def _tell(steps: Steps, length: int, note: Callable[[str], None]) -> None:
    for name, axis in steps.axes.items():
        note(f"input {name}: {length} along axis {axis}, in {count(len(steps), 'step')} of {steps.size}")
    for name, array in steps.whole.items():
        note(f"input {name}: all of {list(array.shape)} at each step")
    rest = length % steps.size
    if rest:
        short = f"the last part has {rest} of {steps.size} elements"
        dropped = steps.total * steps.size < length
        fate = "dropped" if dropped else "padded with zeros" if steps.padded else "sent as it is"
        note(f"{short}: {fate}")
