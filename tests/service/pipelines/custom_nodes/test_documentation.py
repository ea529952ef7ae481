"""The nodes that the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ovmstrio.runtimes.pipelines.custom_nodes.open_node import open_custom_node
from tests.support.native_nodes import compiled
from tests.support.tasks import hosting

PAGE = Path(__file__).parents[4] / "docs" / "custom_nodes.md"
X = {"x": np.array([[0.25, 1.0]], np.float32)}


def example(language: str) -> str:
    """Give the only example in a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


async def test_the_node_in_c_computes(tmp_path: Path) -> None:
    """It compiles without a warning."""
    source = tmp_path / "threshold.c"
    source.write_text(example("c"))
    library = compiled(source, tmp_path / "threshold.so", "-Wall", "-Werror")
    async with hosting() as tasks:
        node = await open_custom_node(library, "node", {"limit": "0.5"}, tasks=tasks)
        assert (await node.execute(X))["y"].tolist() == [[0, 1]]
        await node.aclose()


async def test_the_node_in_python_computes(tmp_path: Path) -> None:
    """Its parameter has a default."""
    file = tmp_path / "scale.py"
    file.write_text(example("python"))
    for params, expected in (({}, [[0.5, 2]]), ({"factor": "4"}, [[1, 4]])):
        async with hosting() as tasks:
            node = await open_custom_node(file, "node", params, tasks=tasks)
            assert (await node.execute(X))["y"].tolist() == expected
            await node.aclose()
