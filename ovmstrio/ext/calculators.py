"""Calculator API: protocols, errors and packet values."""

from ovmstrio.core.tensor import BY_NAME
from ovmstrio.graphs.calculator import (
    Calculator,
    CalculatorKind,
    ContractError,
    DefinitionScope,
    NodeContext,
    NodeContract,
    NodeFailure,
    NodeResources,
)
from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.packets import OvTensor

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
