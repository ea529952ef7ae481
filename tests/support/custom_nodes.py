"""Custom nodes without a pipeline: opened, run by the test, and closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent

from ovmstrio.runtimes.pipelines.custom_nodes.builtin.builtin_node import BuiltinNode, open_builtin
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import CustomNode
from ovmstrio.runtimes.pipelines.custom_nodes.python.python_node import open_python_node
from tests.support.tasks import hosting

DOUBLER = """
    import numpy as np

    def get_inputs_info(params):
        return {"x": ("FP32", [1, -1])}

    def get_outputs_info(params):
        return {"y": (np.float32, (1, 0))}

    def execute(inputs, params):
        return {"y": inputs["x"] * np.float32(params.get("factor", 2))}
"""
"""A Python node that multiplies by its parameter ``factor``."""


def write_node(folder: Path, source: str = DOUBLER, file: str = "node.py") -> Path:
    path = folder / file
    path.write_text(dedent(source).lstrip("\n"))
    return path


@asynccontextmanager
async def opened_python(
    folder: Path, source: str = DOUBLER, *, hide_errors: bool = False, **params: str
) -> AsyncIterator[CustomNode]:
    """Open a Python node called ``node`` of this source."""
    file = write_node(folder, source)
    async with hosting() as tasks:
        node = await open_python_node(file, "node", params, tasks=tasks, hide_errors=hide_errors)
        try:
            yield node
        finally:
            await node.aclose()


async def opened_builtin(builtin: str, **params: object) -> BuiltinNode:
    return await open_builtin(builtin, "node", {name: str(value) for name, value in params.items()})
