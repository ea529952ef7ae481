"""What writes a calculator: its protocols, its errors, and what flows through graphs."""

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.runtimes.graphs.calculator import (
    Calculator,
    CalculatorKind,
    ContractError,
    DefinitionScope,
    NodeContext,
    NodeContract,
    NodeFailure,
    NodeResources,
)
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.packets import OvTensor

__all__ = [
    "BY_NAME",
    "Calculator",
    "CalculatorKind",
    "ContractError",
    "DefinitionScope",
    "NodeConfig",
    "NodeContext",
    "NodeContract",
    "NodeFailure",
    "NodeResources",
    "OvTensor",
    "Port",
]
