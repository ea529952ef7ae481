"""The words in which inputs of graphs are refused; fixed parts are OVMS's."""

from __future__ import annotations

from typing import Final

from ovmstrio.core.datatypes import Datatype
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import InferInput
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.runtimes.models.rejections import refused, show_shape

__all__ = [
    "CONTENT_SIZE",
    "INPUT_FORMAT",
    "MAX_BYTES",
    "PRECISION",
    "described",
    "negative_dimension",
    "no_contents",
    "too_large",
    "zero_dimension",
]

MAX_BYTES: Final = 2**63 - 1
"""The most bytes that a shape may declare."""

CONTENT_SIZE: Final = "Invalid content size of tensor proto"
INPUT_FORMAT: Final = "Inputs inside buffer does not match expected format."
PRECISION: Final = "Invalid input precision"
_SHAPE: Final = "Invalid input shape"


def described(given: InferInput, datatype: Datatype) -> TensorSpec:
    """Describe an input of a graph, about which only the request says anything."""
    return TensorSpec(given.name, datatype, (), None)


def negative_dimension(given: InferInput) -> InvalidRequest:
    """Make the error for a shape with a size below 0."""
    shape = show_shape(given.shape)
    return refused(_SHAPE, f"Negative dimension size is not acceptable: {shape}; input name: {given.name}")


def zero_dimension(given: InferInput) -> InvalidRequest:
    """Make the error for a shape with a size below 1 where there must be at least one element."""
    shape = show_shape(given.shape)
    return refused(_SHAPE, f"Negative or zero dimension size is not acceptable: {shape}; input name: {given.name}")


def too_large(given: InferInput) -> InvalidRequest:
    """Make the error for a shape whose bytes cannot be counted in 64 bits."""
    detail = "Provided shape and datatype declare too large buffer."
    return refused(CONTENT_SIZE, f"{detail} Shape: {show_shape(given.shape)}; input name: {given.name}")


def no_contents(given: InferInput) -> InvalidRequest:
    """Make the error for an input that came without any values."""
    return refused(CONTENT_SIZE, f"Input does not have input tensor contents field; input name: {given.name}")
