from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ovmstrio.work.isolation.isolated_code import Isolation
from ovmstrio.work.user_code.printing import prints_logged
from tests.support.python_nodes import make_node, nodes

SOURCE = """
import sys
print("imported")
class OvmsPythonModel:
    def initialize(self, kwargs):
        print("initialized", kwargs["node_name"])
    {execute}
    def finalize(self):
        print("finalized")
"""
PLAIN = """
    def execute(self, inputs):
        print("pl", end="", flush=True)
        print("ain")
        print("left open", end="")
        return [Tensor("out", b"")]
"""
ASYNC = PLAIN.replace("def", "async def")
GENERATOR = """
    def execute(self, inputs):
        print("plain")
        yield [Tensor("out", b"")]
        print("left open", end="")
"""


@pytest.mark.parametrize("isolation", [None, Isolation()], ids=["threads", "processes"])
@pytest.mark.parametrize("execute", [PLAIN, ASYNC, GENERATOR], ids=["plain", "async", "generator"])
async def test_each_line_is_logged_with_its_node(tmp_path: Path, execute: str, isolation: Isolation | None) -> None:
    node = make_node(name="counter", generative=execute is GENERATOR)
    with capture_logs() as logged, prints_logged():
        async with nodes(tmp_path, isolation=isolation) as opened:
            loaded = await opened.load(node, SOURCE.replace("    {execute}", execute))
            async with loaded.opened() as instance:
                await instance.generate()
    lines = [(line["event"], line["servable"], line["node"], line["stream"]) for line in logged]
    said = ["imported", "initialized counter", "plain", "left open", "finalized"]
    assert lines == [(text, "graph", "counter", "stdout") for text in said]
