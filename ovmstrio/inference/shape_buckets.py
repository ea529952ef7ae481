"""Shape buckets: pad inputs up to a few sizes, and cut the padding off the outputs.

::

    arrays ── ShapeBuckets.fit ──> PaddedInputs ── filled() ──> arrays of few shapes ── inference ──> sliced outputs
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import openvino as ov

from ovmstrio.config.documents import member_path
from ovmstrio.config.shapes import SHAPE_BUCKETS
from ovmstrio.config.specs import DimensionBuckets, ModelSpec
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, InvalidRequest, ModelFailure, Problem
from ovmstrio.core.tensor import BYTES, Array, Dim, TensorSpec, to_bf16
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.signature import ModelSignature, dims_of, read_signature, settings_by_port, to_partial_shape

FitResult = Literal["exact", "padded", "larger"]
"""Result of fitting: sizes equal a bucket, were padded to one, or exceed the largest in a dimension."""


class PaddedAxis(NamedTuple):
    """Dimension of one input (by position) and its padding value."""

    tensor: int
    axis: int
    value: Any


class OutputSlice(NamedTuple):
    """Dimension of an output that is ``padded`` long, of which the caller gets ``size``."""

    axis: int
    size: int
    padded: int


OutputSlices = Mapping[int, Sequence[OutputSlice]]
"""Padding to remove from outputs, by position in the signature."""

NO_SLICES: Final[OutputSlices] = {}


@dataclass(frozen=True, slots=True)
class BucketDimension:
    """Dimension shared by inputs; ``outputs`` are (output position, axis) pairs that follow it."""

    name: str
    sizes: tuple[int, ...]
    inputs: tuple[PaddedAxis, ...]
    outputs: tuple[tuple[int, int], ...]
    allows_larger: bool = False
    warm_up: bool = True

    def bucket(self, size: int) -> int:
        """Return the smallest bucket for a size, or the size itself if it exceeds all."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else size


class PaddedInputs:
    """Inputs of one call with their padding.

    Attributes:
        given: number of elements of the inputs that have buckets.
        added: number of padding elements.
    """

    __slots__ = ("_arrays", "_padded_axes", "added", "fit", "given", "output_slices")

    def __init__(self, arrays: Sequence[Array], grown: Mapping[int, Sequence[tuple[PaddedAxis, int]]]) -> None:
        self._arrays = arrays
        self._padded_axes = grown
        self.fit: FitResult = "exact"
        self.output_slices: dict[int, list[OutputSlice]] = {}  # padding to remove from the outputs
        self.given = self.added = 0

    @property
    def padded_bytes(self) -> int:
        """Number of bytes that :meth:`filled` writes."""
        return sum(prod(self._shape(tensor)) * self._arrays[tensor].itemsize for tensor in self._padded_axes)

    def count(self, tensors: Sequence[int]) -> None:
        """Count the elements of inputs that have buckets."""
        self.given = sum(self._arrays[tensor].size for tensor in tensors)
        self.added = sum(prod(self._shape(tensor)) - self._arrays[tensor].size for tensor in self._padded_axes)

    def filled(self) -> list[Array]:
        """Return the inputs for the model; padded ones are copies."""
        return [
            self._pad(tensor) if tensor in self._padded_axes else array for tensor, array in enumerate(self._arrays)
        ]

    def _shape(self, tensor: int) -> list[int]:
        shape = list(self._arrays[tensor].shape)
        for place, bucket in self._padded_axes[tensor]:
            shape[place.axis] = bucket
        return shape

    def _pad(self, tensor: int) -> Array:
        array = self._arrays[tensor]
        padded: Array = np.empty(self._shape(tensor), array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        for place, _ in self._padded_axes[tensor]:
            beyond = (slice(None),) * place.axis + (slice(array.shape[place.axis], None),)
            padded[beyond] = place.value
        return padded


class ShapeBuckets:
    """Buckets of one model; ``inputs`` are its inputs in the order of the arrays."""

    def __init__(self, dimensions: Sequence[BucketDimension], inputs: Sequence[TensorSpec]) -> None:
        self.dimensions = tuple(dimensions)
        self._names = [spec.name for spec in inputs]
        self._tensors = sorted({place.tensor for dimension in dimensions for place in dimension.inputs})

    def fit(self, arrays: Sequence[Array]) -> PaddedInputs:
        """Find the buckets of a call's inputs, without copying.

        Raises:
            InvalidRequest: inputs disagree on a dimension's size, or it exceeds the largest bucket.
        """
        grown: dict[int, list[tuple[PaddedAxis, int]]] = {}
        fitted = PaddedInputs(arrays, grown)
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
                fitted.output_slices.setdefault(tensor, []).append(OutputSlice(axis, size, bucket))
        fitted.fit = "larger" if larger else "padded" if grown else "exact"
        fitted.count(self._tensors)
        return fitted

    def all_sizes(self) -> list[tuple[int, ...]]:
        """Return size combinations for warm-up, small ones first; a dimension without warm-up has its smallest size."""
        every = [each.sizes if each.warm_up else each.sizes[:1] for each in self.dimensions]
        return sorted(product(*every), key=prod) if any(each.warm_up for each in self.dimensions) else []

    def shaped(self, arrays: Sequence[Array], sizes: Sequence[int]) -> PaddedInputs:
        """Pad inputs up to the given sizes, which must not be smaller."""
        grown: dict[int, list[tuple[PaddedAxis, int]]] = {}
        fitted = PaddedInputs(arrays, grown)
        for dimension, size in zip(self.dimensions, sizes, strict=True):
            for place in dimension.inputs:
                grown.setdefault(place.tensor, []).append((place, size))
            first = dimension.inputs[0]
            given = arrays[first.tensor].shape[first.axis]
            for tensor, axis in dimension.outputs:
                fitted.output_slices.setdefault(tensor, []).append(OutputSlice(axis, given, size))
        return fitted

    def _size(self, dimension: BucketDimension, arrays: Sequence[Array]) -> int:
        sizes = [arrays[place.tensor].shape[place.axis] for place in dimension.inputs]
        if min(sizes) != max(sizes):
            each = zip(sizes, dimension.inputs, strict=True)
            got = ", ".join(f"{size} in dimension {place.axis} of {self._names[place.tensor]}" for size, place in each)
            raise InvalidRequest(
                f"Invalid input shape - Expected: one size of {dimension.name!r} (shape_buckets) in all its inputs; "
                f"Actual: {got}"
            )
        return int(sizes[0])

    def _check_larger(self, dimension: BucketDimension, size: int) -> None:
        if dimension.allows_larger:
            return
        place = dimension.inputs[0]
        sizes = ", ".join(map(str, dimension.sizes))
        raise InvalidRequest(
            f"Invalid input shape - Expected: at most {dimension.sizes[-1]} in dimension {place.axis}, the largest of "
            f"the buckets {sizes} of {dimension.name!r} (shape_buckets); Actual: {size}; "
            f"input name: {self._names[place.tensor]}"
        )


def slice_output(array: Array, output_slices: Sequence[OutputSlice], name: str) -> Array:
    """Return a view of an output without its padding; raise ModelFailure if it does not have the padded size."""
    kept = [slice(None)] * array.ndim
    for axis, size, padded in output_slices:
        if array.ndim <= axis or array.shape[axis] != padded:
            raise ModelFailure(
                f"cannot remove the padding of output {name!r} (shape_buckets): expected {padded} in dimension "
                f"{axis}, got the shape {list(array.shape)}"
            )
        kept[axis] = slice(size)
    return array[tuple(kept)]


# ----------------------------------------------------------------------
# Outputs that follow a bucketed dimension
# ----------------------------------------------------------------------

_MAX_DIM: Final = 4096  # assumed upper bound of dimensions without buckets
_FIXED_DIM: Final = 3  # fixed size for such dimensions where bounds lead to unknown output sizes
_MIN_PROBES: Final = 2

_Shapes = list[tuple[Dim, ...]]


def find_following_outputs(
    model: ov.Model, signature: ModelSignature, dimensions: Sequence[BucketDimension], settled: Collection[str]
) -> list[BucketDimension]:
    """Return the dimensions with the outputs that follow each; dimensions in ``settled`` keep the configured outputs.

    Raises:
        ConfigError: an output depends on a dimension in another or unknown way, the model rejects a bucket, or an input
            that must have the same size is not named.
    """
    probes = _Probes(model.clone(), signature, dimensions)
    found: list[BucketDimension] = []
    problems: list[Problem] = []
    for dimension in dimensions:
        path = member_path(SHAPE_BUCKETS, dimension.name)
        try:
            shapes = probes.by_size(dimension)
            problems += probes.missing_inputs(dimension)
            if dimension.name in settled:
                found.append(dimension)
                continue
            is_bounded = all(dim.high != -1 for each in shapes.values() for dims in each for dim in dims)
            closed = {} if is_bounded else probes.by_size(dimension, closed=True)
            found.append(replace(dimension, outputs=_follows(path, signature, shapes, closed)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


class _Probes:
    def __init__(self, model: ov.Model, signature: ModelSignature, dimensions: Sequence[BucketDimension]) -> None:
        self._model = model
        self._signature = signature
        self._largest = {
            (place.tensor, place.axis): Dim.fixed(dimension.sizes[-1])
            for dimension in dimensions
            for place in dimension.inputs
        }

    def by_size(self, dimension: BucketDimension, *, closed: bool = False) -> dict[int, _Shapes]:
        """Return output shapes for a few sizes of a dimension; if ``closed``, with all other dimensions fixed."""
        found: dict[int, _Shapes] = {}
        others = _fixed_dim if closed else _bounded
        for size in self._sizes(dimension):
            if len(found) > _MIN_PROBES:
                break
            try:
                found[size] = self._outputs(self._inputs(dimension, size, dict.fromkeys(self._positions, others)))
            except OPENVINO_ERRORS as error:
                if size in dimension.sizes and not closed:
                    message = f"the model does not accept the size {size}: {openvino_error_message(error)}"
                    raise ConfigError(
                        [Problem(message, path=f"{member_path(SHAPE_BUCKETS, dimension.name)}.sizes")]
                    ) from None
        if len(found) < _MIN_PROBES and not closed:
            message = "the model accepts one size only: cannot determine which outputs follow"
            raise ConfigError([Problem(message, path=f"{member_path(SHAPE_BUCKETS, dimension.name)}.sizes")])
        return found

    def missing_inputs(self, dimension: BucketDimension) -> list[Problem]:
        """Return a problem for each unnamed input that must have the same size as a dimension."""
        size = dimension.sizes[-1]
        own = {place.tensor for place in dimension.inputs}
        problems: list[Problem] = []
        for position in self._positions:
            spec = self._signature.inputs[position]
            others = [dim for axis, dim in enumerate(spec.shape) if (position, axis) not in self._largest]
            if position in own or not any(_is_beyond(dim, size) for dim in others):
                continue
            kinds = dict.fromkeys(self._positions, _bounded) | {position: lambda dim: _beyond(dim, size)}
            try:
                self._outputs(self._inputs(dimension, size, kinds))
            except OPENVINO_ERRORS:
                message = f"input {spec.name!r} must have the same size, but is not listed"
                path = f"{member_path(SHAPE_BUCKETS, dimension.name)}.inputs"
                problems.append(Problem(message, path=path, found=str(spec), suggestion=f'add "{spec.name}"'))
        return problems

    @property
    def _positions(self) -> range:
        return range(len(self._signature.inputs))

    def _sizes(self, dimension: BucketDimension) -> list[int]:
        """Return sizes to try: buckets and others. 1 comes last, because it broadcasts."""
        first, last = dimension.sizes[0], dimension.sizes[-1]
        inputs = self._signature.inputs
        return [
            size
            for size in dict.fromkeys((*filter(lambda size: size > 1, (first, last)), last + 1, 2 * last, last - 1, 1))
            if all(inputs[place.tensor].shape[place.axis].accepts(size) for place in dimension.inputs) and size > 0
        ]

    def _inputs(self, dimension: BucketDimension, size: int, others: Mapping[int, Callable[[Dim], Dim]]) -> _Shapes:
        own = {(place.tensor, place.axis): Dim.fixed(size) for place in dimension.inputs}
        settled = self._largest | own
        return [
            tuple(settled.get((position, axis)) or others[position](dim) for axis, dim in enumerate(spec.shape))
            for position, spec in enumerate(self._signature.inputs)
        ]

    def _outputs(self, inputs: _Shapes) -> _Shapes:
        model, ports = self._model, self._signature.input_ports
        model.reshape({model.inputs[port]: to_partial_shape(dims) for port, dims in zip(ports, inputs, strict=True)})
        shapes = (model.outputs[port].get_partial_shape() for port in self._signature.output_ports)
        return [dims_of(shape, ()) for shape in shapes]


def _bounded(dim: Dim) -> Dim:
    if dim.is_fixed:
        return dim
    return Dim(max(dim.low, 1), max(dim.low, _MAX_DIM) if dim.high == -1 else max(dim.high, 1))


def _fixed_dim(dim: Dim) -> Dim:
    return Dim.fixed(_FIXED_DIM if dim.accepts(_FIXED_DIM) else max(dim.low, 1))


def _is_beyond(dim: Dim, size: int) -> bool:
    return not dim.is_fixed and dim.accepts(size + 1)


def _beyond(dim: Dim, size: int) -> Dim:
    return Dim(size + 1, size + _MAX_DIM if dim.high == -1 else dim.high) if _is_beyond(dim, size) else _bounded(dim)


def _follows(
    path: str, signature: ModelSignature, shapes: Mapping[int, _Shapes], closed: Mapping[int, _Shapes]
) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    problems: list[Problem] = []
    for position, spec in enumerate(signature.outputs):
        ranks = {len(each[position]) for each in shapes.values()}
        if signature.output_ports[position] in signature.unranked_outputs or len(ranks) > 1:
            problems.append(_unknown(path, spec.name, "the number of its dimensions is"))
            continue
        for axis in range(ranks.pop()):
            sizes = {size: each[position][axis] for size, each in shapes.items()}
            if any(dim.high == -1 for dim in sizes.values()) and closed:
                sizes = {size: each[position][axis] for size, each in closed.items()}
            if all(dim == Dim.fixed(size) for size, dim in sizes.items()):
                found.append((position, axis))
            elif any(dim.high == -1 for dim in sizes.values()):
                problems.append(_unknown(path, spec.name, f"dimension {axis} is"))
            elif len(set(sizes.values())) > 1:
                problems.append(_not_removable(path, spec.name, axis, sizes))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _unknown(path: str, output: str, what: str) -> Problem:
    return Problem(
        f"cannot determine whether output {output!r} follows: {what} known at run time only",
        path=path,
        suggestion=f'if it follows, name the dimension: "outputs": {{"{output}": 0}}; if none does, "outputs": {{}}',
    )


def _not_removable(path: str, output: str, axis: int, sizes: Mapping[int, Dim]) -> Problem:
    return Problem(
        f"padding of output {output!r} cannot be removed",
        path=path,
        expected=f"a dimension {axis} equal to that of the inputs, or constant",
        found=", ".join(f"{dim} for {size}" for size, dim in sizes.items()),
        suggestion="leave this dimension out of shape_buckets",
    )


# ----------------------------------------------------------------------
# Configuration
# ----------------------------------------------------------------------

_TRUTH: Final = (0, 1)


def plan_buckets(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, file: str) -> ShapeBuckets | None:
    """Apply the configured buckets to a model; None if there are none. ConfigError lists all problems."""
    if not spec.shape_buckets:
        return None
    signature = read_signature(model, mapping, file)
    problems: list[Problem] = []
    if model.get_variables():
        message = "shape_buckets requires a stateless model: padding would enter the state"
        problems.append(Problem(message, file=file, path=SHAPE_BUCKETS, suggestion="leave shape_buckets out"))
    dimensions: list[BucketDimension] = []
    for name, dimension in spec.shape_buckets.items():
        try:
            dimensions.append(_dimension(name, dimension, signature, mapping, spec.origin))
        except ConfigError as error:
            problems += error.problems
    problems += _named_twice(dimensions, signature)
    if not problems:
        try:
            settled = {name for name, given in spec.shape_buckets.items() if given.outputs is not None}
            dimensions = find_following_outputs(model, signature, dimensions, settled)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError([replace(problem, file=problem.file or file) for problem in problems])
    return ShapeBuckets(dimensions, signature.inputs)


def _named_twice(dimensions: Sequence[BucketDimension], signature: ModelSignature) -> list[Problem]:
    """Return a problem for each input dimension that two buckets name."""
    owners: dict[tuple[int, int], str] = {}
    return [
        Problem(
            f"dimension {place.axis} of {signature.inputs[place.tensor].name!r} is in {owner!r} already",
            path=member_path(SHAPE_BUCKETS, dimension.name),
            suggestion='name other "inputs", or leave one of them out',
        )
        for dimension in dimensions
        for place in dimension.inputs
        if (owner := owners.setdefault((place.tensor, place.axis), dimension.name)) != dimension.name
    ]


def _dimension(
    name: str, given: DimensionBuckets, signature: ModelSignature, mapping: TensorMapping, origin: str
) -> BucketDimension:
    path = member_path(SHAPE_BUCKETS, name)
    inputs = signature.inputs
    if given.inputs:
        names = [spec.name for spec in inputs]
        axes = settings_by_port(f"{path}.inputs", given.inputs, names, mapping.inputs, origin=origin)
    else:
        axes = _batch_axes(path, inputs)
    problems = [
        problem
        for tensor, positions in axes.items()
        for axis in positions
        for problem in _check_input(f"{path}.inputs", inputs[tensor], axis, given.sizes)
    ]
    follows: tuple[tuple[int, int], ...] = ()
    try:
        follows = _named_outputs(path, given.outputs or {}, signature, mapping, origin)
    except ConfigError as error:
        problems += error.problems
    values = _pad_values(path, given, [inputs[tensor] for tensor in axes], problems)
    if problems:
        raise ConfigError(problems)
    places = [PaddedAxis(at, axis, values[inputs[at].name]) for at, positions in axes.items() for axis in positions]
    return BucketDimension(name, given.sizes, tuple(places), follows, given.larger == "run", given.warm_up)


def _batch_axes(path: str, inputs: Sequence[TensorSpec]) -> dict[int, tuple[int, ...]]:
    unbatched = [spec for spec in inputs if spec.batch_axis is None]
    if unbatched or not inputs:
        message = f"input {unbatched[0].name!r} has no batch dimension" if unbatched else "the model has no inputs"
        suggestion = 'name the dimensions: "inputs": {"name": 0}'
        raise ConfigError([Problem(message, path=path, suggestion=suggestion)])
    return {position: (spec.batch_axis or 0,) for position, spec in enumerate(inputs)}


def _check_input(path: str, spec: TensorSpec, axis: int, sizes: Sequence[int]) -> list[Problem]:
    problem = Problem("", path=member_path(path, spec.name), found=str(spec))
    if spec.datatype is BYTES:
        return [replace(problem, message="string inputs cannot be padded", suggestion="leave the input out")]
    if axis >= len(spec.shape):
        message = f"the input {spec.name!r} has no dimension {axis}"
        return [replace(problem, message=message, expected=f"0 to {len(spec.shape) - 1}" if spec.shape else "")]
    dim = spec.shape[axis]
    if dim.is_fixed:
        message = f"dimension {axis} of the input {spec.name!r} is fixed and cannot be padded"
        return [replace(problem, message=message, suggestion="open it with shape or batch_size, such as -1")]
    bad = [str(size) for size in sizes if not dim.accepts(size)]
    if bad:
        message = f"dimension {axis} of the input {spec.name!r} does not accept the size {', '.join(bad)}"
        return [replace(problem, message=message, expected=f"sizes of {dim}")]
    return []


def _named_outputs(
    path: str, named: Mapping[str, tuple[int, ...]], signature: ModelSignature, mapping: TensorMapping, origin: str
) -> tuple[tuple[int, int], ...]:
    names = [spec.name for spec in signature.outputs]
    axes = settings_by_port(f"{path}.outputs", named, names, mapping.outputs, origin=origin)
    found = [(position, axis) for position, positions in axes.items() for axis in positions]
    problems: list[Problem] = []
    for position, axis in found:
        spec = signature.outputs[position]
        if axis >= len(spec.shape) and signature.output_ports[position] not in signature.unranked_outputs:
            message = f"the output {spec.name!r} has no dimension {axis}"
            problems.append(Problem(message, path=member_path(f"{path}.outputs", spec.name), found=str(spec)))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _pad_values(
    path: str, given: DimensionBuckets, inputs: Sequence[TensorSpec], problems: list[Problem]
) -> dict[str, Any]:
    known = {spec.name for spec in inputs}
    problems += [
        Problem(
            "pad names an unknown input of this dimension",
            path=f"{path}.pad",
            expected=" or ".join(map(repr, sorted(known))),
            found=repr(name),
        )
        for name in given.pad
        if name not in known
    ]
    values: dict[str, Any] = {}
    for spec in inputs:
        try:
            values[spec.name] = _element(given.pad.get(spec.name, 0), spec)
        except (OverflowError, ValueError):
            found = str(given.pad[spec.name])
            message = "padding value does not fit the input"
            problems.append(
                Problem(message, path=member_path(f"{path}.pad", spec.name), expected=str(spec), found=found)
            )
    return values


def _element(value: float, spec: TensorSpec) -> Any:
    dtype = spec.datatype.numpy
    if spec.datatype is BYTES:
        return b""
    if spec.datatype.name == "BF16":
        return to_bf16(np.array(value, np.float32))[()]
    if dtype.kind == "f":
        with np.errstate(over="raise"):
            try:
                return np.array(value, np.float64).astype(dtype)[()]
            except FloatingPointError:
                raise ValueError from None
    if value != int(value) or (dtype.kind == "b" and value not in _TRUTH):
        raise ValueError
    return dtype.type(int(value))
