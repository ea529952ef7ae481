"""Bring ``shape_buckets`` to the inputs and outputs of a model, or tell why it cannot have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import openvino as ov

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.shape_buckets import OPTION
from ovmstrio.config.specs import BucketedDimension, ModelSpec
from ovmstrio.core.datatypes import BYTES, to_bf16
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.openvino.bucket_outputs import following_outputs
from ovmstrio.openvino.buckets import Dimension, PaddedAxis, ShapeBuckets
from ovmstrio.openvino.device_settings import for_ports
from ovmstrio.openvino.signature import ModelSignature, read_signature

__all__ = ["plan_buckets"]

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
