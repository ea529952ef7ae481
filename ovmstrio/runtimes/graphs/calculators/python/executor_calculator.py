"""The kind of calculator that graph files call PythonExecutorCalculator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.graphs.calculator import CalculatorKind, DefinitionScope, NodeContext, NodeContract
from ovmstrio.runtimes.graphs.calculators.python.python_calculator import PythonCalculator
from ovmstrio.runtimes.graphs.calculators.python.python_contract import contract_of, handler_path_of
from ovmstrio.runtimes.graphs.calculators.python.python_handler import NodeHandler
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig

__all__ = ["PYTHON_EXECUTOR"]

_NO_FILE: Final = "The Python Node file path does not exist"


class PythonNodeResources(NodeHandler):
    """What all instances of a Python node share."""

    async def open(self, context: NodeContext) -> PythonCalculator:
        """Make the calculator of one instance.

        Raises:
            NodeFailure: the handler's ``open`` raised.
            ServerError: it raised this itself.

        Cancellation: while the handler's ``open`` runs.
        """
        calculator = PythonCalculator(self, context)
        await calculator.open()
        return calculator


class _PythonExecutorKind:
    name: str = "PythonExecutorCalculator"

    def contract(self, node: NodeConfig) -> NodeContract:
        """Say that the node's streams carry Python tensors.

        Raises:
            ContractError: a stream, side packet, name or option is missing or too many.
        """
        return contract_of(node)

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> PythonNodeResources:
        """Import the handler, make its object and initialize it, in the graph's worker threads.

        Raises:
            ConfigError: there is no such file, it does not import, or its class or ``initialize`` fails.

        Cancellation: user code that runs is given the pool's grace; an object that was made is finalized.
        """
        file = _existing(node, scope.directory)
        handler = PythonNodeResources(node, file, scope)
        try:
            await handler.load()
        except BaseException:
            with trio.CancelScope(shield=True):
                await handler.aclose()
            raise
        return handler


def _existing(node: NodeConfig, directory: Path) -> Path:
    """Find the handler's file; a relative path starts at the graph's folder.

    Raises:
        ConfigError: there is none.
    """
    written = handler_path_of(node)
    # Only the text is tidied: a folder of links, as clusters mount them, stays the folder that siblings are in.
    file = Path(os.path.normpath(directory.absolute() / written.replace("\\", "/")))
    if file.is_file():
        return file
    found = "is a folder" if file.is_dir() else "does not exist"
    problem = Problem(
        f"{_NO_FILE} - Python node handler_path: {file} {found}.",
        line=node.line or None,
        path=f"node {node.name!r}",
        suggestion=f"a relative handler_path starts at {directory}",
    )
    raise ConfigError([problem])


PYTHON_EXECUTOR: Final[CalculatorKind] = _PythonExecutorKind()
