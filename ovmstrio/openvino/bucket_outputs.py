"""Find out which dimensions of a model's outputs follow a dimension of its inputs.

The model's shapes are propagated for several sizes of one dimension, all others being the same each time.  What is
each time as large as the input follows it, what never changes does not, and what changes otherwise cannot be cut back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import openvino as ov

from ovmstrio.config.shape_buckets import OPTION
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Dim
from ovmstrio.openvino.buckets import Dimension
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.openvino.signature import ModelSignature, dims_of, to_partial_shape

__all__ = ["following_outputs"]

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
