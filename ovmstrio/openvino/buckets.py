"""Pad inputs up to buckets of sizes, and cut what was added off the outputs.

::

    arrays ── ShapeBuckets.fit ──> Fitted ── filled() ──> arrays of few shapes ── inference ──> cut(cuts) ──> outputs
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.tensor import Array, TensorSpec

__all__ = ["NO_CUTS", "Cut", "Cuts", "Dimension", "Fit", "Fitted", "PaddedAxis", "ShapeBuckets", "cut_view"]

Fit = Literal["exact", "padded", "larger"]
"""Whether inputs had the sizes of buckets, got them, or are larger than the largest in a dimension."""


class PaddedAxis(NamedTuple):
    """A dimension of one input, by the position of the input among all, and what it is padded with."""

    tensor: int
    axis: int
    value: Any


class Cut(NamedTuple):
    """A dimension of an output that is ``padded`` long, of which the caller gets ``size``."""

    axis: int
    size: int
    padded: int


Cuts = Mapping[int, Sequence[Cut]]
"""What is cut off outputs, by their position in the signature."""

NO_CUTS: Final[Cuts] = {}


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension that inputs share; ``outputs`` are pairs of an output's position and the axis that follows."""

    name: str
    sizes: tuple[int, ...]
    inputs: tuple[PaddedAxis, ...]
    outputs: tuple[tuple[int, int], ...]
    larger_runs: bool = False
    warm_up: bool = True

    def bucket(self, size: int) -> int:
        """Give the least bucket for a size, or the size itself if there is none."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else size


class Fitted:
    """The inputs of one call, and what becomes of them.

    Attributes:
        fit: how well they fitted.
        cuts: what is to be cut off the outputs.
        given: how many elements the inputs have that are padded in some dimension.
        added: how many elements the padding of these has.
    """

    __slots__ = ("_arrays", "_grown", "added", "cuts", "fit", "given")

    def __init__(self, arrays: Sequence[Array], grown: Mapping[int, Sequence[tuple[PaddedAxis, int]]]) -> None:
        self._arrays = arrays
        self._grown = grown
        self.fit: Fit = "exact"
        self.cuts: dict[int, list[Cut]] = {}
        self.given = self.added = 0

    @property
    def padded_bytes(self) -> int:
        """How many bytes :meth:`filled` writes."""
        return sum(prod(self._shape(tensor)) * self._arrays[tensor].itemsize for tensor in self._grown)

    def count(self, tensors: Sequence[int]) -> None:
        """Count the elements of inputs that have buckets."""
        self.given = sum(self._arrays[tensor].size for tensor in tensors)
        self.added = sum(prod(self._shape(tensor)) - self._arrays[tensor].size for tensor in self._grown)

    def filled(self) -> list[Array]:
        """Give the inputs as the model gets them; those that are padded are copies."""
        return [self._filled(tensor) if tensor in self._grown else array for tensor, array in enumerate(self._arrays)]

    def _shape(self, tensor: int) -> list[int]:
        shape = list(self._arrays[tensor].shape)
        for place, bucket in self._grown[tensor]:
            shape[place.axis] = bucket
        return shape

    def _filled(self, tensor: int) -> Array:
        array = self._arrays[tensor]
        padded: Array = np.empty(self._shape(tensor), array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        for place, _ in self._grown[tensor]:
            beyond = (slice(None),) * place.axis + (slice(array.shape[place.axis], None),)
            padded[beyond] = place.value
        return padded


class ShapeBuckets:
    """The buckets of one model.

    Args:
        dimensions: those that have buckets.
        inputs: the inputs of the model, in the order of the arrays.
    """

    def __init__(self, dimensions: Sequence[Dimension], inputs: Sequence[TensorSpec]) -> None:
        self.dimensions = tuple(dimensions)
        self._names = [spec.name for spec in inputs]
        self._tensors = sorted({place.tensor for dimension in dimensions for place in dimension.inputs})

    def fit(self, arrays: Sequence[Array]) -> Fitted:
        """Find the buckets of a call's inputs; nothing is copied.

        Raises:
            InvalidRequest: a dimension has another size in each of its inputs, or is larger than its largest bucket.
        """
        grown: dict[int, list[tuple[PaddedAxis, int]]] = {}
        fitted = Fitted(arrays, grown)
        larger = False
        for dimension in self.dimensions:
            size = self._size(dimension, arrays)
            bucket = dimension.bucket(size)
            if bucket > dimension.sizes[-1]:
                self._check_larger(dimension, size)
                larger = True
            if bucket == size:
                continue
            for place in dimension.inputs:
                grown.setdefault(place.tensor, []).append((place, bucket))
            for tensor, axis in dimension.outputs:
                fitted.cuts.setdefault(tensor, []).append(Cut(axis, size, bucket))
        fitted.fit = "larger" if larger else "padded" if grown else "exact"
        fitted.count(self._tensors)
        return fitted

    def all_sizes(self) -> list[tuple[int, ...]]:
        """Give all sizes that the dimensions may have together, small ones first.

        A dimension that is not to be warmed up has its smallest size in each of them.
        """
        every = [each.sizes if each.warm_up else each.sizes[:1] for each in self.dimensions]
        return sorted(product(*every), key=prod) if any(each.warm_up for each in self.dimensions) else []

    def shaped(self, arrays: Sequence[Array], sizes: Sequence[int]) -> Fitted:
        """Pad inputs up to the sizes given, which are not smaller than theirs."""
        grown: dict[int, list[tuple[PaddedAxis, int]]] = {}
        fitted = Fitted(arrays, grown)
        for dimension, size in zip(self.dimensions, sizes, strict=True):
            for place in dimension.inputs:
                grown.setdefault(place.tensor, []).append((place, size))
            first = dimension.inputs[0]
            given = arrays[first.tensor].shape[first.axis]
            for tensor, axis in dimension.outputs:
                fitted.cuts.setdefault(tensor, []).append(Cut(axis, given, size))
        return fitted

    def _size(self, dimension: Dimension, arrays: Sequence[Array]) -> int:
        sizes = [arrays[place.tensor].shape[place.axis] for place in dimension.inputs]
        if min(sizes) != max(sizes):
            each = zip(sizes, dimension.inputs, strict=True)
            told = ", ".join(f"{size} in dimension {place.axis} of {self._names[place.tensor]}" for size, place in each)
            raise InvalidRequest(
                f"Invalid input shape - Expected: one size of {dimension.name!r} (shape_buckets) in all its inputs; "
                f"Actual: {told}"
            )
        return int(sizes[0])

    def _check_larger(self, dimension: Dimension, size: int) -> None:
        if dimension.larger_runs:
            return
        place = dimension.inputs[0]
        sizes = ", ".join(map(str, dimension.sizes))
        raise InvalidRequest(
            f"Invalid input shape - Expected: at most {dimension.sizes[-1]} in dimension {place.axis}, the largest of "
            f"the buckets {sizes} of {dimension.name!r} (shape_buckets); Actual: {size}; "
            f"input name: {self._names[place.tensor]}"
        )


def cut_view(array: Array, cuts: Sequence[Cut], name: str) -> Array:
    """Give a view of what is left of an output.

    Raises:
        ModelFailure: the output has not the size in a dimension that it was thought to follow the inputs in.
    """
    kept = [slice(None)] * array.ndim
    for axis, size, padded in cuts:
        if array.ndim <= axis or array.shape[axis] != padded:
            raise ModelFailure(
                f"output {name!r} cannot be cut back to what the request asked for: expected {padded} in dimension "
                f"{axis}, because inputs were padded (shape_buckets), found the shape {list(array.shape)}"
            )
        kept[axis] = slice(size)
    return array[tuple(kept)]
