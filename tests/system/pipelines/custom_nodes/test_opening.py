"""Custom nodes of shared libraries in isolated processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trio

from ovmstrio.runtimes.pipelines.custom_nodes.native.isolated_node import IsolatedNode
from ovmstrio.runtimes.pipelines.custom_nodes.open_node import open_custom_node
from ovmstrio.runtimes.pipelines.custom_nodes.python.python_node import PythonNode
from tests.support.custom_nodes import write_node
from tests.support.native_nodes import copy_of_fixture

X = {"x": np.array([[1.0, 2.0]], np.float32)}


async def test_shared_libraries_may_run_in_processes(tmp_path: Path) -> None:
    """Where they are to be isolated; Python files stay."""
    async with trio.open_nursery() as nursery:
        native = await open_custom_node(copy_of_fixture(tmp_path), "node", {}, tasks=nursery, is_isolated=True)
        python = await open_custom_node(write_node(tmp_path), "node", {}, tasks=nursery, is_isolated=True)
        assert [type(node) for node in (native, python)] == [IsolatedNode, PythonNode]
        assert (await native.execute(X))["y"].tolist() == [[1, 2]]
        await native.aclose()
        await python.aclose()
