"""PyTensorOvTensorConverterCalculator: between the tensors of Python nodes and those of OpenVINO nodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.runtimes.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract, NodeFailure
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, map_entry, options_of, ports_of
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.packets import OvTensor
from ovmstrio.runtimes.graphs.tensors.arrays import NUMERIC_DATATYPES
from ovmstrio.runtimes.graphs.tensors.python_tensors import contents_of, python_tensor
from ovmstrio.runtimes.models.buffers import buffer_of, wrapped
from pyovms import Tensor

__all__ = ["CONVERTER", "to_ov", "to_python"]

_NAME: Final = "PyTensorOvTensorConverterCalculator"
_OPTIONS: Final = "mediapipe.PyTensorOvTensorConverterCalculatorOptions"
_PYTHON: Final = "OVMS_PY_TENSOR"
_OPENVINO: Final = "OVTENSOR"
_TYPES: Final = {_PYTHON: Tensor, _OPENVINO: OvTensor}
_OTHER: Final = {_PYTHON: _OPENVINO, _OPENVINO: _PYTHON}


class _Target(NamedTuple):
    """Where a converted tensor goes; ``name`` is the Python tensor's, empty for one of OpenVINO."""

    port: Port
    name: str


def to_ov(tensor: Tensor) -> OvTensor:
    """Make OpenVINO's tensor of a Python one, as its datatype and shape say.

    Raises:
        NodeFailure: the datatype is no number, a dimension is negative, or the bytes do not fit.
    """
    if tensor.datatype not in NUMERIC_DATATYPES:
        raise NodeFailure(f"Undefined precision in input python tensor: {tensor.datatype}", "INVALID_ARGUMENT")
    datatype, shape = BY_NAME[tensor.datatype], tuple(tensor.shape)
    for size in shape:
        if size < 0:
            raise NodeFailure(f"dimension negative during conversion: {size}", "INVALID_ARGUMENT")
    expected = prod(shape) * datatype.itemsize
    if tensor.size != expected:
        sizes = f"python buffer size: {tensor.size}; OV tensor size: {expected}"
        raise NodeFailure(f"{sizes}; mismatch", "INVALID_ARGUMENT")
    return OvTensor(datatype, wrapped(contents_of(tensor), shape, datatype.numpy))


def to_python(name: str, tensor: OvTensor) -> Tensor:
    """Make a Python tensor of OpenVINO's.

    Raises:
        NodeFailure: its elements are no numbers.
    """
    datatype = tensor.datatype.name
    if datatype not in NUMERIC_DATATYPES:
        raise NodeFailure(f"Undefined precision in input tensor: {tensor.datatype.openvino}", "INVALID_ARGUMENT")
    return python_tensor(name, buffer_of(tensor.array), tensor.array.shape, datatype)


class _Converter(Stateless):
    """Converts each input that has come and sends it where it belongs."""

    __slots__ = ("_targets",)

    def __init__(self, targets: Mapping[Port, _Target], context: NodeContext) -> None:
        del context
        self._targets = targets

    async def process(self, context: NodeContext) -> None:
        """Convert.  Never waits.

        Raises:
            NodeFailure: a tensor cannot be converted, or nothing has come.
        """
        if not context.inputs:
            raise NodeFailure(f"no input at timestamp {context.timestamp}")
        for port, value in context.inputs.items():
            target = self._targets[port]
            converted: Any = to_python(target.name, value) if target.name else to_ov(value)
            context.emit(target.port, converted)


def _contract(node: NodeConfig) -> NodeContract:
    """Pair inputs with outputs by what follows ``OVMS_PY_TENSOR`` and ``OVTENSOR`` in their tags.

    Raises:
        ContractError: a tag is another, a stream has no partner, or a Python tensor is given no name.
    """
    targets = _targets(node)
    if node.side_inputs or node.side_outputs:
        raise ContractError(f"{_NAME} has no side packets", fix="remove them")
    inputs: dict[Port, type] = {port: _TYPES[_prefix(port)] for port in targets}
    outputs: dict[Port, type] = {target.port: _TYPES[_prefix(target.port)] for target in targets.values()}
    return NodeContract(inputs, outputs, propagates_bounds=True)


def _prefix(port: Port) -> str:
    for prefix in _TYPES:
        if port.tag.startswith(prefix):
            return prefix
    raise ContractError(f"{port} is no tag of {_NAME}", fix=f"use tags that begin with {_PYTHON} or {_OPENVINO}")


def _partner(port: Port) -> Port:
    prefix = _prefix(port)
    return Port(_OTHER[prefix] + port.tag.removeprefix(prefix), port.index)


def _targets(node: NodeConfig) -> dict[Port, _Target]:
    inputs, outputs = ports_of(node.inputs), set(ports_of(node.outputs))
    if not inputs or not outputs:
        raise ContractError(f"{_NAME} needs at least one input and one output stream")
    partners = {port: _partner(port) for port in inputs}
    for port, partner in partners.items():
        if partner not in outputs:
            raise ContractError(f"input {port} has no output {partner}", fix=f'add output_stream: "{partner}:..."')
    lonely = outputs - set(partners.values())
    if lonely:
        port = min(lonely)
        raise ContractError(f"output {port} has no input {_partner(port)}", fix="remove it or add the input")
    return {port: _Target(partner, _name_for(node, partner)) for port, partner in partners.items()}


def _name_for(node: NodeConfig, output: Port) -> str:
    """Give the name that a Python tensor gets on this output; empty for OpenVINO's tensors, which have none."""
    if _prefix(output) == _OPENVINO:
        return ""
    options = options_of(node, _OPTIONS)
    name = None if options is None else map_entry(options.tag_to_output_tensor_names, output)
    if not name:
        entry = f'tag_to_output_tensor_names {{ key: "{output}" value: "..." }}'
        raise ContractError(
            f"tag_to_output_tensor_names does not say what the Python tensor of output {output} is called",
            fix=f"add node_options {{ [type.googleapis.com/{_OPTIONS}]: {{ {entry} }} }}",
        )
    return name


CONVERTER: Final[CalculatorKind] = StatelessKind(_NAME, _contract, lambda node: partial(_Converter, _targets(node)))
