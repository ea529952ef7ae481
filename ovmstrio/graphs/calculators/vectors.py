"""MediaPipe's vector calculators: concatenate tensors to a vector, split a vector of tensors."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any, Final

from ovmstrio.graphs.calculator import CalculatorKind, ContractError, NodeContext, NodeContract, NodeFailure
from ovmstrio.graphs.calculators.nodes import (
    CalculatorBase,
    StatelessKind,
    joining_contract,
    options_or_defaults,
    ports_of,
)
from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.packets import TensorValue

# ConcatenateTensorVectorCalculator

_CONCATENATE_NAME: Final = "ConcatenateTensorVectorCalculator"
_CONCATENATE_OPTIONS: Final = "mediapipe.ConcatenateVectorCalculatorOptions"
_OUTPUT: Final = Port("", 0)


class _Concatenate(CalculatorBase):
    __slots__ = ("_needs_all",)

    def __init__(self, *, needs_all: bool) -> None:
        self._needs_all = needs_all

    async def process(self, context: NodeContext) -> None:
        if self._needs_all and len(context.inputs) < len(context.node.inputs):
            return
        joined = tuple(element for port, value in context.inputs.items() for element in _elements(port, value))
        context.emit(_OUTPUT, joined)


def _elements(port: Port, value: Any) -> tuple[Any, ...]:
    if isinstance(value, TensorValue):
        return (value,)
    if isinstance(value, tuple):
        return value
    raise NodeFailure(f"input {port}: expected a tensor or a vector of tensors, got {type(value).__name__}")


CONCATENATE_VECTOR: Final[CalculatorKind] = StatelessKind(
    _CONCATENATE_NAME,
    lambda node: joining_contract(_CONCATENATE_NAME, node, tuple),
    lambda node: (
        lambda _: _Concatenate(needs_all=options_or_defaults(node, _CONCATENATE_OPTIONS).only_emit_if_all_present)
    ),
)


# SplitTensorVectorCalculator

_SPLIT_NAME: Final = "SplitTensorVectorCalculator"
_SPLIT_OPTIONS: Final = "mediapipe.SplitVectorCalculatorOptions"


class _Split(CalculatorBase):
    __slots__ = ("_combines", "_elements", "_ranges")

    def __init__(self, options: Any) -> None:
        self._ranges = [slice(each.begin, each.end) for each in options.ranges]
        self._elements = options.element_only
        self._combines = options.combine_outputs

    async def process(self, context: NodeContext) -> None:
        vector = next(iter(context.inputs.values()))
        needed = max(each.stop for each in self._ranges)
        if len(vector) < needed:
            raise NodeFailure(f"the vector has {len(vector)} elements, the ranges need {needed}")
        parts = [vector[each] for each in self._ranges]
        if self._combines:
            parts = [tuple(chain(*parts))]
        for ref, part in zip(context.node.sorted_outputs, parts, strict=True):
            context.emit(ref.port, part[0] if self._elements and not self._combines else part)


def _split_contract(node: NodeConfig) -> NodeContract:
    options = options_or_defaults(node, _SPLIT_OPTIONS)
    wanted = 1 if options.combine_outputs else len(options.ranges)
    if len(node.inputs) != 1 or not options.ranges or len(node.outputs) != wanted:
        raise ContractError(
            f"{_SPLIT_NAME} needs one input and {wanted} outputs (one per range), got {len(node.outputs)} outputs",
            fix="add an output per range, or use combine_outputs and one output",
        )
    _check_ranges(options)
    kind = object if options.element_only and not options.combine_outputs else tuple
    return NodeContract(
        {node.inputs[0].port: tuple}, dict.fromkeys(ports_of(node.outputs), kind), propagates_bounds=True
    )


def _check_ranges(options: Any) -> None:
    for each in options.ranges:
        if not 0 <= each.begin < each.end:
            raise ContractError(f"{_SPLIT_NAME}: the range from {each.begin} to {each.end} is empty or begins below 0")
        if options.element_only and not options.combine_outputs and each.end - each.begin != 1:
            raise ContractError(
                f"{_SPLIT_NAME}: with element_only the range from {each.begin} must end at {each.begin + 1}"
            )
    if any(one.begin < other.end and other.begin < one.end for one, other in combinations(options.ranges, 2)):
        raise ContractError(f"{_SPLIT_NAME}: ranges of tensors must not overlap")


SPLIT_VECTOR: Final[CalculatorKind] = StatelessKind(
    _SPLIT_NAME, _split_contract, lambda node: lambda _: _Split(options_or_defaults(node, _SPLIT_OPTIONS))
)
