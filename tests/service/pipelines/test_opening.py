from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.pipelines.builtin.builtin_node import BuiltinNode
from ovmstrio.pipelines.native.node import NativeNode
from ovmstrio.pipelines.open_node import open_custom_node
from ovmstrio.pipelines.python_node import PythonNode
from tests.support.native_nodes import compiled, copy_of_fixture
from tests.support.pipelines import hosting, write_node

PAGE = Path(__file__).parents[3] / "docs" / "custom_nodes.md"
X = {"x": np.array([[0.25, 1.0]], np.float32)}


async def test_files_and_names_have_their_kinds_of_nodes(tmp_path: Path) -> None:
    async with hosting() as tasks:
        python = await open_custom_node(write_node(tmp_path), "node", {"factor": "3"}, tasks=tasks)
        native = await open_custom_node(copy_of_fixture(tmp_path), "node", {}, tasks=tasks)
        add_one = await open_custom_node(Path("add_one"), "node", {}, tasks=tasks)
        in_container = await open_custom_node(
            Path("/ovms/lib/custom_nodes/libcustom_node_add_one.so"), "node", {}, tasks=tasks
        )
        kinds = [type(node) for node in (python, native, add_one, in_container)]
        assert kinds == [PythonNode, NativeNode, BuiltinNode, BuiltinNode]
        assert (await python.execute(X))["y"].tolist() == [[0.75, 3]]
        assert (await native.execute(X))["y"].tolist() == [[0.25, 1]]
        for node in (python, native, add_one, in_container):
            await node.aclose()


@pytest.mark.parametrize(("name", "text"), [("none.so", "there is no such file"), (".", "it is a folder")])
async def test_missing_file_is_reported_with_built_in_names(tmp_path: Path, name: str, text: str) -> None:
    async with hosting() as tasks:
        with pytest.raises(ConfigError) as raised:
            await open_custom_node(tmp_path / name, "node", {}, tasks=tasks)
        (problem,) = raised.value.problems
        assert text in problem.message
        assert "add_one, east_ocr" in problem.suggestion


async def test_hidden_errors_of_python_files_have_no_text(tmp_path: Path) -> None:
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


def example(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


async def test_documented_node_in_c_computes(tmp_path: Path) -> None:
    source = tmp_path / "threshold.c"
    source.write_text(example("c"))
    library = compiled(source, tmp_path / "threshold.so", "-Wall", "-Werror")
    async with hosting() as tasks:
        node = await open_custom_node(library, "node", {"limit": "0.5"}, tasks=tasks)
        assert (await node.execute(X))["y"].tolist() == [[0, 1]]
        await node.aclose()


async def test_documented_node_in_python_computes(tmp_path: Path) -> None:
    file = tmp_path / "scale.py"
    file.write_text(example("python"))
    for params, expected in (({}, [[0.5, 2]]), ({"factor": "4"}, [[1, 4]])):
        async with hosting() as tasks:
            node = await open_custom_node(file, "node", params, tasks=tasks)
            assert (await node.execute(X))["y"].tolist() == expected
            await node.aclose()
