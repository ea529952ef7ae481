"""Pad inputs up to buckets of sizes, and cut what was added off the outputs.

::

    arrays ── ShapeBuckets.fit ──> Fitted ── filled() ──> arrays of few shapes ── inference ──> cut(cuts) ──> outputs
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

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.shapes import OPTION
from ovmstrio.config.specs import BucketedDimension, ModelSpec
from ovmstrio.core.errors import ConfigError, InvalidRequest, ModelFailure, Problem
from ovmstrio.core.tensor import BYTES, Array, Dim, TensorSpec, to_bf16
from ovmstrio.inference.runtime import OPENVINO_ERRORS, reason
from ovmstrio.inference.signature import ModelSignature, dims_of, for_ports, read_signature, to_partial_shape

__all__ = [
    "NO_CUTS",
    "Cut",
    "Cuts",
    "Dimension",
    "Fit",
    "Fitted",
    "PaddedAxis",
    "ShapeBuckets",
    "cut_view",
    "following_outputs",
    "plan_buckets",
]

# ----------------------------------------------------------------------
# Pad inputs up to buckets of sizes, and cut what was added off the outputs
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Find out which dimensions of a model's outputs follow a dimension of its inputs
# ----------------------------------------------------------------------

_MOST: Final = 4096
"""Up to which size dimensions without buckets are taken to be, as bounds tell what depends on what."""
_FEW: Final = 3
"""A size for them where bounds tell nothing."""
_LEAST_PROBES: Final = 2

_Shapes = list[tuple[Dim, ...]]
"""The shapes of all outputs in the order of the signature; empty where the number of dimensions is not known."""


def following_outputs(
    model: ov.Model, signature: ModelSignature, dimensions: Sequence[Dimension], settled: Collection[str]
) -> list[Dimension]:
    """Give the dimensions with the outputs that follow each; of those that are settled their user has named them.

    The model itself stays as it is.

    Raises:
        ConfigError: an output changes with a dimension in another way, nobody can tell, the model does not take a
            bucket, or an input that has to follow as well is not named.
    """
    probes = _Probes(model.clone(), signature, dimensions)
    found: list[Dimension] = []
    problems: list[Problem] = []
    for dimension in dimensions:
        path = f"{OPTION}.{dimension.name}"
        try:
            shapes = probes.by_size(dimension)
            problems += probes.forgotten(dimension)
            if dimension.name in settled:
                found.append(dimension)
                continue
            closed = {} if _is_clear(shapes) else probes.by_size(dimension, closed=True)
            found.append(replace(dimension, outputs=_follows(path, signature, shapes, closed)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


class _Probes:
    """Propagates shapes through a model that is there for nothing else."""

    def __init__(self, model: ov.Model, signature: ModelSignature, dimensions: Sequence[Dimension]) -> None:
        self._model = model
        self._signature = signature
        self._largest = {
            (place.tensor, place.axis): Dim.fixed(dimension.sizes[-1])
            for dimension in dimensions
            for place in dimension.inputs
        }

    def by_size(self, dimension: Dimension, *, closed: bool = False) -> dict[int, _Shapes]:
        """Give the shapes of outputs for a few sizes of a dimension; if ``closed``, with no other dimension open.

        Raises:
            ConfigError: the model does not take a bucket, or too few sizes to compare.
        """
        found: dict[int, _Shapes] = {}
        others = _few if closed else _bounded
        for size in self._sizes(dimension):
            if len(found) > _LEAST_PROBES:
                break
            try:
                found[size] = self._outputs(self._inputs(dimension, size, dict.fromkeys(self._positions, others)))
            except OPENVINO_ERRORS as error:
                if size in dimension.sizes and not closed:
                    message = f"the model cannot take the size {size}: {reason(error)}"
                    raise ConfigError([Problem(message, path=f"{OPTION}.{dimension.name}.sizes")]) from None
        if len(found) < _LEAST_PROBES and not closed:
            message = "the model takes one size only, so that nothing tells which outputs follow"
            raise ConfigError([Problem(message, path=f"{OPTION}.{dimension.name}.sizes")])
        return found

    def forgotten(self, dimension: Dimension) -> list[Problem]:
        """Tell which inputs have to be as large as those of a dimension and are not among them."""
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
                message = f"the input {spec.name!r} has to have the same size, and is not named"
                path = f"{OPTION}.{dimension.name}.inputs"
                problems.append(Problem(message, path=path, found=str(spec), suggestion=f'add "{spec.name}"'))
        return problems

    @property
    def _positions(self) -> range:
        return range(len(self._signature.inputs))

    def _sizes(self, dimension: Dimension) -> list[int]:
        """Give sizes to try: buckets, and some that are none.  1 is what other dimensions are broadcast to."""
        first, last = dimension.sizes[0], dimension.sizes[-1]
        inputs = self._signature.inputs
        return [
            size
            for size in dict.fromkeys((*filter(lambda size: size > 1, (first, last)), last + 1, 2 * last, last - 1, 1))
            if all(inputs[place.tensor].shape[place.axis].accepts(size) for place in dimension.inputs) and size > 0
        ]

    def _inputs(self, dimension: Dimension, size: int, others: Mapping[int, Callable[[Dim], Dim]]) -> _Shapes:
        own = {(place.tensor, place.axis): Dim.fixed(size) for place in dimension.inputs}
        settled = self._largest | own
        return [
            tuple(settled.get((position, axis)) or others[position](dim) for axis, dim in enumerate(spec.shape))
            for position, spec in enumerate(self._signature.inputs)
        ]

    def _outputs(self, inputs: _Shapes) -> _Shapes:
        """Propagate shapes; raises what OpenVINO raises."""
        model, ports = self._model, self._signature.input_ports
        model.reshape({model.inputs[port]: to_partial_shape(dims) for port, dims in zip(ports, inputs, strict=True)})
        shapes = (model.outputs[port].get_partial_shape() for port in self._signature.output_ports)
        return [dims_of(shape, ()) for shape in shapes]


def _bounded(dim: Dim) -> Dim:
    if dim.is_fixed:
        return dim
    return Dim(max(dim.low, 1), max(dim.low, _MOST) if dim.high == -1 else max(dim.high, 1))


def _few(dim: Dim) -> Dim:
    return Dim.fixed(_FEW if dim.accepts(_FEW) else max(dim.low, 1))


def _is_beyond(dim: Dim, size: int) -> bool:
    return not dim.is_fixed and dim.accepts(size + 1)


def _beyond(dim: Dim, size: int) -> Dim:
    return Dim(size + 1, size + _MOST if dim.high == -1 else dim.high) if _is_beyond(dim, size) else _bounded(dim)


def _is_clear(shapes: Mapping[int, _Shapes]) -> bool:
    return all(dim.high != -1 for each in shapes.values() for dims in each for dim in dims)


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
                problems.append(_otherwise(path, spec.name, axis, sizes))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _unknown(path: str, output: str, what: str) -> Problem:
    return Problem(
        f"nobody can tell whether the output {output!r} follows, as {what} known at run time only",
        path=path,
        suggestion=f'if it does, say in which dimension: "outputs": {{"{output}": 0}}; if none does, "outputs": {{}}',
    )


def _otherwise(path: str, output: str, axis: int, sizes: Mapping[int, Dim]) -> Problem:
    told = ", ".join(f"{dim} for {size}" for size, dim in sizes.items())
    return Problem(
        f"the output {output!r} follows in a way that cannot be cut back",
        path=path,
        expected=f"a dimension {axis} as large as that of the inputs, or one that stays",
        found=told,
        suggestion="leave this dimension out of shape_buckets",
    )


# ----------------------------------------------------------------------
# Bring ``shape_buckets`` to the inputs and outputs of a model, or tell why it cannot have them
# ----------------------------------------------------------------------

_TRUTH: Final = (0, 1)


def plan_buckets(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, file: str) -> ShapeBuckets | None:
    """Bring the buckets of a configuration to a model's tensors; None if there are none.  The model stays as it is.

    Raises:
        ConfigError: with everything because of which the model cannot have them.
    """
    if not spec.shape_buckets:
        return None
    signature = read_signature(model, mapping, file)
    problems = [_no_state(file)] if model.get_variables() else []
    dimensions: list[Dimension] = []
    for name, dimension in spec.shape_buckets.items():
        try:
            dimensions.append(_dimension(name, dimension, signature, mapping, spec.origin))
        except ConfigError as error:
            problems += error.problems
    problems += _shared(dimensions, signature)
    if not problems:
        try:
            settled = {name for name, given in spec.shape_buckets.items() if given.outputs is not None}
            dimensions = following_outputs(model, signature, dimensions, settled)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError([replace(problem, file=problem.file or file) for problem in problems])
    return ShapeBuckets(dimensions, signature.inputs)


def _shared(dimensions: Sequence[Dimension], signature: ModelSignature) -> list[Problem]:
    """Tell which dimensions of inputs are the batch dimension of all inputs, and were named as well."""
    owners: dict[tuple[int, int], str] = {}
    return [
        Problem(
            f"dimension {place.axis} of {signature.inputs[place.tensor].name!r} is in {owner!r} already",
            path=f"{OPTION}.{dimension.name}",
            suggestion='name other "inputs", or leave one of them out',
        )
        for dimension in dimensions
        for place in dimension.inputs
        if (owner := owners.setdefault((place.tensor, place.axis), dimension.name)) != dimension.name
    ]


def _no_state(file: str) -> Problem:
    message = "the model remembers what it has seen, and would remember what was padded"
    return Problem(message, file=file, path=OPTION, suggestion="leave shape_buckets out")


def _dimension(
    name: str, given: BucketedDimension, signature: ModelSignature, mapping: TensorMapping, origin: str
) -> Dimension:
    """Find the inputs of a dimension, and the outputs that its user named."""
    path = f"{OPTION}.{name}"
    inputs = signature.inputs
    if given.inputs:
        names = [spec.name for spec in inputs]
        axes = for_ports(f"{path}.inputs", given.inputs, names, mapping.inputs, origin=origin)
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
    return Dimension(name, given.sizes, tuple(places), follows, given.larger == "run", given.warm_up)


def _batch_axes(path: str, inputs: Sequence[TensorSpec]) -> dict[int, tuple[int, ...]]:
    lacking = [spec for spec in inputs if spec.batch_axis is None]
    if lacking or not inputs:
        message = f"input {lacking[0].name!r} has no batch dimension" if lacking else "the model has no inputs"
        suggestion = 'say which dimensions are meant: "inputs": {"name": 0}'
        raise ConfigError([Problem(message, path=path, suggestion=suggestion)])
    return {position: (spec.batch_axis or 0,) for position, spec in enumerate(inputs)}


def _check_input(path: str, spec: TensorSpec, axis: int, sizes: Sequence[int]) -> list[Problem]:
    problem = Problem("", path=f"{path}.{spec.name}", found=str(spec))
    if spec.datatype is BYTES:
        return [replace(problem, message="texts cannot be padded", suggestion="leave the input out")]
    if axis >= len(spec.shape):
        message = f"the input {spec.name!r} has no dimension {axis}"
        return [replace(problem, message=message, expected=f"0 to {len(spec.shape) - 1}" if spec.shape else "")]
    dim = spec.shape[axis]
    if dim.is_fixed:
        message = f"dimension {axis} of the input {spec.name!r} is fixed, so that nothing can be padded"
        return [replace(problem, message=message, suggestion="open it with shape or batch_size, such as -1")]
    bad = [str(size) for size in sizes if not dim.accepts(size)]
    if bad:
        message = f"dimension {axis} of the input {spec.name!r} does not take the size {', '.join(bad)}"
        return [replace(problem, message=message, expected=f"sizes of {dim}")]
    return []


def _named_outputs(
    path: str, named: Mapping[str, tuple[int, ...]], signature: ModelSignature, mapping: TensorMapping, origin: str
) -> tuple[tuple[int, int], ...]:
    """Give the axes of outputs that a user says follow the dimension.

    Raises:
        ConfigError: there are none such.
    """
    names = [spec.name for spec in signature.outputs]
    axes = for_ports(f"{path}.outputs", named, names, mapping.outputs, origin=origin)
    found = [(position, axis) for position, positions in axes.items() for axis in positions]
    problems: list[Problem] = []
    for position, axis in found:
        spec = signature.outputs[position]
        if axis >= len(spec.shape) and signature.output_ports[position] not in signature.unranked_outputs:
            message = f"the output {spec.name!r} has no dimension {axis}"
            problems.append(Problem(message, path=f"{path}.outputs.{spec.name}", found=str(spec)))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _pad_values(
    path: str, given: BucketedDimension, inputs: Sequence[TensorSpec], problems: list[Problem]
) -> dict[str, Any]:
    """Give the value for each input, as an element of its array."""
    known = {spec.name for spec in inputs}
    problems += [
        Problem(
            "pad names what is no input of this dimension",
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
            message = "the input cannot have this value"
            problems.append(Problem(message, path=f"{path}.pad.{spec.name}", expected=str(spec), found=found))
    return values


def _element(value: float, spec: TensorSpec) -> Any:
    """Make an element of an input.

    Raises:
        OverflowError, ValueError: it cannot be one.
    """
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
