"""ConcatenateTensorVectorCalculator: tensors and vectors of tensors become one vector, in the order of inputs."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.runtimes.graphs.calculator import CalculatorKind, NodeContext, NodeFailure
from ovmstrio.runtimes.graphs.calculators.nodes import Stateless, StatelessKind, given_options, joining_contract
from ovmstrio.runtimes.graphs.config.graph_config import Port
from ovmstrio.runtimes.graphs.packets import TensorValue

__all__ = ["CONCATENATE_VECTOR"]

_NAME: Final = "ConcatenateTensorVectorCalculator"
_OPTIONS: Final = "mediapipe.ConcatenateVectorCalculatorOptions"
_OUTPUT: Final = Port("", 0)


class _Concatenate(Stateless):
    __slots__ = ("_needs_all",)

    def __init__(self, *, needs_all: bool) -> None:
        self._needs_all = needs_all

    async def process(self, context: NodeContext) -> None:
        """Send the vector of what has come.  Never waits.

        Raises:
            NodeFailure: something else than a tensor or a vector has come.
        """
        if self._needs_all and len(context.inputs) < len(context.node.inputs):
            return
        joined = tuple(element for port, value in context.inputs.items() for element in _elements(port, value))
        context.emit(_OUTPUT, joined)


def _elements(port: Port, value: Any) -> tuple[Any, ...]:
    if isinstance(value, TensorValue):
        return (value,)
    if isinstance(value, tuple):
        return value
    raise NodeFailure(f"input {port} is a {type(value).__name__}, and must be a tensor or a vector of tensors")


def _open(context: NodeContext) -> _Concatenate:
    return _Concatenate(needs_all=given_options(context.node, _OPTIONS).only_emit_if_all_present)


CONCATENATE_VECTOR: Final[CalculatorKind] = StatelessKind(
    _NAME, lambda node: joining_contract(_NAME, node, tuple), lambda _: _open
)
