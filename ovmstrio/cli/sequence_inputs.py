"""Request inputs of ``ovms sequence run``: cuts the input arrays along an axis, one part per step."""

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
    """Invalid value of an option for the given model or data."""


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """Options for cutting arrays.

    Attributes:
        size: length of a part; None for the size of the model's input.
        axis: axis of the model's input; negative values count from the end.
        pad: True pads a short last part, False drops it, None pads it if the input has a fixed size.
        unsliced: names of inputs that are never cut.
    """

    size: int | None = None
    axis: int = 0
    pad: bool | None = None
    unsliced: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Steps:
    """Requests of a sequence: iterating yields the inputs of each step.

    Attributes:
        sliced: arrays that are cut, all of the same length along their axes.
        axes: axes of the arrays that are cut.
        unsliced: arrays sent unchanged with every step.
        size: length of a part.
        total: number of steps.
        padded: whether a short last part is padded.
    """

    sliced: Mapping[str, Array]
    axes: Mapping[str, int]
    unsliced: Mapping[str, Array]
    size: int
    total: int
    padded: bool

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for number in range(self.total):
            parts = {name: self._part(name, number) for name in self.sliced}
            yield {**self.unsliced, **parts}

    def _part(self, name: str, number: int) -> Array:
        array, axis = self.sliced[name], self.axes[name]
        begin = number * self.size
        part = array[(slice(None),) * axis + (slice(begin, begin + self.size),)]
        missing = self.size - part.shape[axis]
        if not missing or not self.padded:
            return part
        shape = (*part.shape[:axis], missing, *part.shape[axis + 1 :])
        filling = np.full(shape, b"", object) if part.dtype.hasobject else np.zeros(shape, part.dtype)
        return np.concatenate([part, filling], axis)


def plan(
    given: Sequence[str], expected: Sequence[TensorInfo], slicing: SliceOptions, print_message: Callable[[str], None]
) -> Steps:
    """Read the inputs and plan the steps; report conversions and the cut and uncut inputs to ``print_message``.

    Raises:
        WrongOption: the axis, the size or a name does not fit the model, or there is nothing to send.
        InvalidRequest: a file cannot be parsed, or does not fit the input.
        OSError: a file cannot be read.
    """
    axes = _axes(expected, slicing)
    arrays = read_inputs(
        given, [_with_dynamic_axis(tensor, axes.get(tensor.name)) for tensor in expected], print_message
    )
    lengths = {name: arrays[name].shape[axis] for name, axis in axes.items()}
    longest = max(lengths.values())
    sliced = {name: arrays[name] for name, length in lengths.items() if length == longest}
    known = {tensor.name: tensor for tensor in expected}
    unsliced = {name: array for name, array in arrays.items() if name not in sliced}
    _check_unsliced(unsliced, known)
    sizes = {name: known[name].shape[axes[name]] for name in sliced}
    size = _size(sizes, slicing)
    padded = slicing.pad is not False and (slicing.pad is True or any(each != -1 for each in sizes.values()))
    total = longest // size if slicing.pad is False else -(-longest // size)
    if not total:
        raise WrongOption(
            f"{', '.join(sliced)}: the length of {longest} along the axis is shorter than a part of {size}"
        )
    steps = Steps(sliced, {name: axes[name] for name in sliced}, unsliced, size, total, padded)
    _report_plan(steps, longest, print_message)
    return steps


def _axes(expected: Sequence[TensorInfo], slicing: SliceOptions) -> dict[str, int]:
    """Find the axis of every input that may be cut."""
    unknown = sorted(slicing.unsliced - {tensor.name for tensor in expected})
    if unknown:
        names = ", ".join(tensor.name for tensor in expected)
        raise WrongOption(f"--unsliced {unknown[0]}: unknown input; the model takes {names}")
    candidates = [tensor for tensor in expected if tensor.name not in slicing.unsliced]
    if not candidates:
        raise WrongOption("--unsliced names every input, so no input can be cut")
    axes = {
        tensor.name: range(len(tensor.shape))[slicing.axis]
        for tensor in candidates
        if -len(tensor.shape) <= slicing.axis < len(tensor.shape)
    }
    if not axes:
        shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in candidates)
        raise WrongOption(f"--axis {slicing.axis} is out of range: the model takes {shapes}")
    return axes


def _with_dynamic_axis(tensor: TensorInfo, axis: int | None) -> TensorInfo:
    """Make the length of an input along the axis dynamic."""
    if axis is None:
        return tensor
    return replace(tensor, shape=(*tensor.shape[:axis], -1, *tensor.shape[axis + 1 :]))


def _check_unsliced(unsliced: Mapping[str, Array], known: Mapping[str, TensorInfo]) -> None:
    for name, array in unsliced.items():
        wanted = known[name].shape
        if any(each not in {-1, size} for each, size in zip(wanted, array.shape, strict=True)):
            expected = f"{known[name].datatype} {list(wanted)}"
            raise InvalidRequest(
                f'input "{name}" is not the longest along the axis and is sent completely: expected {expected}, '
                f"got {list(array.shape)}"
            )


def _size(sizes: Mapping[str, int], slicing: SliceOptions) -> int:
    """Return the length of a part, which must fit every input that is cut."""
    fixed = [(name, size) for name, size in sizes.items() if size != -1]
    size = slicing.size or (fixed[0][1] if fixed else 0)
    if not size:
        raise WrongOption(f"{', '.join(sizes)}: the length along axis {slicing.axis} is dynamic; set it with --chunk")
    for name, taken in fixed:
        if taken != size:
            raise WrongOption(f'input "{name}": expected {taken} along axis {slicing.axis}, got {size}')
    return size


def _report_plan(steps: Steps, length: int, print_message: Callable[[str], None]) -> None:
    for name, axis in steps.axes.items():
        print_message(f"input {name}: {length} along axis {axis}, in {count(len(steps), 'step')} of {steps.size}")
    for name, array in steps.unsliced.items():
        print_message(f"input {name}: all of {list(array.shape)} at each step")
    rest = length % steps.size
    if rest:
        short = f"the last part has {rest} of {steps.size} elements"
        dropped = steps.total * steps.size < length
        action = "dropped" if dropped else "padded with zeros" if steps.padded else "sent as it is"
        print_message(f"{short}: {action}")
