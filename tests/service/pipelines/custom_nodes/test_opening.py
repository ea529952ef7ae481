"""Opening the library of a custom node, whatever it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.pipelines.custom_nodes.builtin.builtin_node import BuiltinNode
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_node import NativeNode
from ovmstrio.runtimes.pipelines.custom_nodes.open_node import open_custom_node
from ovmstrio.runtimes.pipelines.custom_nodes.python.python_node import PythonNode
from tests.support.custom_nodes import write_node
from tests.support.native_nodes import copy_of_fixture
from tests.support.tasks import hosting

X = {"x": np.array([[1.0, 2.0]], np.float32)}


async def test_files_and_names_open_what_they_are(tmp_path: Path) -> None:
    """Each keeps to the same port."""
    async with hosting() as tasks:
        python = await open_custom_node(write_node(tmp_path), "node", {"factor": "3"}, tasks=tasks)
        native = await open_custom_node(copy_of_fixture(tmp_path), "node", {}, tasks=tasks)
        add_one = await open_custom_node(Path("add_one"), "node", {}, tasks=tasks)
        in_container = await open_custom_node(
            Path("/ovms/lib/custom_nodes/libcustom_node_add_one.so"), "node", {}, tasks=tasks
        )
        kinds = [type(node) for node in (python, native, add_one, in_container)]
        assert kinds == [PythonNode, NativeNode, BuiltinNode, BuiltinNode]
        assert (await python.execute(X))["y"].tolist() == [[3, 6]]
        assert (await native.execute(X))["y"].tolist() == [[1, 2]]
        for node in (python, native, add_one, in_container):
            await node.aclose()


@pytest.mark.parametrize(("name", "text"), [("none.so", "there is no such file"), (".", "it is a folder")])
async def test_what_is_no_file_is_named_with_what_is_built_in(tmp_path: Path, name: str, text: str) -> None:
    """A short name that is misspelt ends here too."""
    async with hosting() as tasks:
        with pytest.raises(ConfigError) as raised:
            await open_custom_node(tmp_path / name, "node", {}, tasks=tasks)
        (problem,) = raised.value.problems
        assert text in problem.message
        assert "add_one, east_ocr" in problem.suggestion


async def test_errors_of_python_files_can_be_hidden(tmp_path: Path) -> None:
    """As those of graphs."""
    source = """
        def get_inputs_info(params):
            return {"x": ("FP32", [1, -1])}
        get_outputs_info = get_inputs_info
        def execute(inputs, params):
            raise ValueError("secret")
    """
    async with hosting() as tasks:
        node = await open_custom_node(write_node(tmp_path, source), "node", {}, tasks=tasks, hide_errors=True)
        with pytest.raises(RuntimeError) as raised:
            await node.execute(X)
        await node.aclose()
        assert "secret" not in str(raised.value)
