"""Which tensors of a model the streams of an inference node carry, and in which form.

A stream carries one tensor, or a tuple of them (``OVTENSORS``, ``TENSORS``) in the order that the options list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.runtimes.graphs.calculator import ContractError, NodeFailure
from ovmstrio.runtimes.graphs.calculators.nodes import map_entry
from ovmstrio.runtimes.graphs.config.graph_config import Port, StreamRef
from ovmstrio.runtimes.graphs.packets import MediaPipeTensor, OvTensor, TensorValue, TfTensor
from ovmstrio.runtimes.graphs.tensors.arrays import MEDIAPIPE_DATATYPES, NUMERIC_DATATYPES
from ovmstrio.runtimes.models.buffers import wrapped

__all__ = ["InferenceOptions", "PortPlan", "plan_ports"]

# The first prefix that fits counts, so longer ones come first.
_PREFIXES: Final[tuple[tuple[str, type[TensorValue], bool], ...]] = (
    ("OVTENSORS", OvTensor, True),
    ("OVTENSOR", OvTensor, False),
    ("TENSORS", MediaPipeTensor, True),
    ("TENSOR", MediaPipeTensor, False),
    ("TFTENSOR", TfTensor, False),
)
_UNSUPPORTED: Final = "TFLITE_TENSOR"


class InferenceOptions(Protocol):
    """The options of an inference node."""

    tag_to_input_tensor_names: Mapping[str, str]
    tag_to_output_tensor_names: Mapping[str, str]
    input_order_list: Sequence[str]
    output_order_list: Sequence[str]


@dataclass(frozen=True, slots=True)
class PortPlan:
    """One stream: the class of its tensors, their names, and whether it carries a tuple of them."""

    port: Port
    kind: type[TensorValue]
    names: tuple[str, ...]
    is_vector: bool = False

    @property
    def carried(self) -> type:
        """The type of the stream."""
        return tuple if self.is_vector else self.kind

    def spread(self, value: Any) -> list[tuple[str, TensorValue]]:
        """Give the tensors of a packet by name.

        Raises:
            NodeFailure: a tuple does not hold as many as the options list.
        """
        if not self.is_vector:
            return [(self.names[0], value)]
        if len(value) != len(self.names):
            raise NodeFailure(
                f"input {self.port} carries {len(value)} tensors, and input_order_list names {len(self.names)}"
            )
        return list(zip(self.names, value, strict=True))

    def collect(self, given: Mapping[str, Tensor | RawTensor], servable: str) -> Any:
        """Make a packet of the outputs of a servable.

        Raises:
            NodeFailure: one is not there, or this stream cannot carry its elements.
        """
        made = []
        for name in self.names:
            tensor = given.get(name)
            if tensor is None:
                known = ", ".join(sorted(given)) or "none"
                raise NodeFailure(f'servable "{servable}" gives no output "{name}" for {self.port}; it gives: {known}')
            made.append(self._convert(tensor))
        return tuple(made) if self.is_vector else made[0]

    def _convert(self, tensor: Tensor | RawTensor) -> TensorValue:
        typed = _typed(tensor) if isinstance(tensor, RawTensor) else tensor
        datatype = typed.datatype
        if self.kind is MediaPipeTensor and datatype.name not in MEDIAPIPE_DATATYPES:
            wanted = ", ".join(sorted(MEDIAPIPE_DATATYPES))
            raise NodeFailure(f'output "{tensor.name}" is {datatype.name}, and {self.port} can carry {wanted}')
        return self.kind(datatype, typed.array)


def _typed(tensor: RawTensor) -> Tensor:
    """Make an array of bytes that user code has described."""
    if tensor.datatype in NUMERIC_DATATYPES:
        datatype, shape, data = BY_NAME[tensor.datatype], tuple(tensor.shape), memoryview(tensor.data)
        if min(shape, default=0) >= 0 and prod(shape) * datatype.itemsize == data.nbytes:
            return Tensor(tensor.name, datatype, wrapped(data, shape, datatype.numpy))
    raise NodeFailure(
        f'output "{tensor.name}" of {len(tensor.data)} bytes is no tensor of {tensor.datatype} {list(tensor.shape)}'
    )


def plan_ports(
    refs: Sequence[StreamRef], names: Mapping[str, str], order: Sequence[str], side: str
) -> tuple[PortPlan, ...]:
    """Find out what each stream carries; ``side`` is ``input`` or ``output``.

    Raises:
        ContractError: a tag is not supported, or the order list does not go with the tags.
    """
    plans = []
    for ref in refs:
        kind, is_vector = _kind_of(ref.port)
        named = tuple(order) if is_vector else (_name_of(ref, names),)
        plans.append(PortPlan(ref.port, kind, named, is_vector))
    _check_order(plans, names, order, side)
    return tuple(plans)


def _kind_of(port: Port) -> tuple[type[TensorValue], bool]:
    if port.tag.startswith(_UNSUPPORTED):
        raise ContractError(f"{port}: TensorFlow Lite tensors are not supported", fix="use OVTENSOR")
    for prefix, kind, is_vector in _PREFIXES:
        if port.tag.startswith(prefix):
            return kind, is_vector
    return OvTensor, False


def _name_of(ref: StreamRef, names: Mapping[str, str]) -> str:
    """Give the tensor's name: what the options say, else the tag's text, else the name of the stream."""
    entry = map_entry(names, ref.port)
    if entry:
        return entry
    return str(ref.port) if ref.port.tag else ref.name


def _check_order(plans: Sequence[PortPlan], names: Mapping[str, str], order: Sequence[str], side: str) -> None:
    vectors = [plan for plan in plans if plan.is_vector]
    option = f"{side}_order_list"
    if vectors and not order:
        raise ContractError(f"{vectors[0].port} carries several tensors", fix=f"name them in {option}")
    if order and len(vectors) != 1:
        raise ContractError(f"{option} goes with exactly one OVTENSORS or TENSORS stream, not {len(vectors)}")
    if order and names:
        raise ContractError(f"{option} and tag_to_{side}_tensor_names exclude each other", fix="remove one")
