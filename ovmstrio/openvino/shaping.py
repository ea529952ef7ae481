"""Bring a model to the batch size and shapes that its configuration, or a request, asks for."""

from __future__ import annotations

from collections.abc import Mapping

import openvino as ov
import structlog

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Dim
from ovmstrio.openvino.device_settings import for_ports
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.openvino.signature import ModelSignature, port_names, read_signature, to_partial_shape

__all__ = ["reshape"]

log = structlog.get_logger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def reshape(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, requested: Shapes, file: str) -> None:
    """Give the model's inputs the shapes of ``spec``, and over these the shapes ``requested`` by name.

    Raises:
        ConfigError: a name is unknown, or the model cannot take the shapes.
    """
    wanted = _configured(model, spec, mapping, file)
    names = port_names(model.inputs, mapping.inputs, is_input=True)
    for name, sizes in requested.items():
        wanted[names.index(name)] = tuple(Dim.fixed(size) for size in sizes)
    if not wanted:
        return
    try:
        model.reshape({model.inputs[index]: to_partial_shape(dims) for index, dims in wanted.items()})
    except OPENVINO_ERRORS as error:
        shapes = ", ".join(f"{names[index]}: ({','.join(map(str, dims))})" for index, dims in wanted.items())
        problem = Problem(f"the model cannot take the shapes {shapes}: {reason(error)}", file=file, path="shape")
        raise ConfigError([problem]) from error


def _configured(model: ov.Model, spec: ModelSpec, mapping: TensorMapping, file: str) -> dict[int, tuple[Dim, ...]]:
    """Find the shapes that the configuration asks for, by position; ``auto`` leaves the model's own until a request."""
    names = port_names(model.inputs, mapping.inputs, is_input=True)
    everywhere = "" in spec.shapes and spec.shapes[""].auto
    shapes = for_ports("shape", spec.shapes, names, mapping.inputs, origin=spec.origin, anonymous_everywhere=everywhere)
    if shapes:
        if spec.batch is not None:
            log.warning("batch size ignored, because a shape is set", model=spec.name)
        return {index: shape.dims for index, shape in shapes.items() if shape.dims is not None}
    if spec.batch is None or spec.batch.dim is None:
        return {}
    return _batched(read_signature(model, mapping, file), spec.batch.dim, spec, file)


def _batched(signature: ModelSignature, batch: Dim, spec: ModelSpec, file: str) -> dict[int, tuple[Dim, ...]]:
    wanted: dict[int, tuple[Dim, ...]] = {}
    for port, tensor in zip(signature.input_ports, signature.inputs, strict=True):
        axis = tensor.batch_axis
        if axis is not None and axis < len(tensor.shape):
            wanted[port] = (*tensor.shape[:axis], batch, *tensor.shape[axis + 1 :])
    if not wanted:
        message = f"batch_size is set, but no input of {spec.name!r} has a batch dimension"
        raise ConfigError(
            [Problem(message, file=file, path="batch_size", suggestion="set a layout with N, or a shape")]
        )
    return wanted
