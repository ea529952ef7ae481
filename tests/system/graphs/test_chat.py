"""Chat graphs in isolated processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from ovmstrio.core.generation import (
    Conversation,
    GenerationRequest,
)
from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.graphs import LOOPBACK, graph_text, loaded, python_node

if TYPE_CHECKING:
    from pathlib import Path


ENDLESS = """
import pathlib
class OvmsPythonModel:
    def initialize(self, kwargs):
        self.log = pathlib.Path(kwargs["base_path"]) / "closed"
    def execute(self, inputs):
        try:
            while True:
                yield [Tensor("text", b"x")]
        finally:
            self.log.write_text("closed")
"""


TWO_OUTPUTS = ("TEXT:text", "END:end")


def _graph(comment: str = "", outputs: tuple[str, ...] = TWO_OUTPUTS, *, more: str = LOOPBACK) -> str:
    node = python_node("handler.py", ["IN:prompt"], outputs, more=more)
    shown = [f"OVMS_PY_TENSOR_{each}" for each in outputs]
    return graph_text(comment, node, inputs=["OVMS_PY_TENSOR:prompt"], outputs=shown)


def _said(text: str, **more: object) -> GenerationRequest:
    conversation = Conversation(({"role": "user", "content": text},))
    return GenerationRequest(conversation, **more)  # type: ignore[arg-type]  # as each test has it


@pytest.mark.parametrize("isolated", [False, True], ids=["threads", "process"])
async def test_leaving_closes_the_generator_before_the_block_is_left(tmp_path: Path, *, isolated: bool) -> None:
    """As for streams over gRPC: a client that goes away ends it."""
    isolation = Isolation() if isolated else None
    async with loaded(tmp_path / "graph", _graph(), isolation=isolation, handler=ENDLESS) as graph:
        async with graph.generate(_said("x")) as generation:
            first = await anext(aiter(generation))
        assert (tmp_path / "graph" / "closed").read_text() == "closed"
        (tmp_path / "graph" / "closed").unlink()
        with trio.CancelScope() as scope:
            async with graph.generate(_said("x")) as generation:
                assert (await anext(aiter(generation))).text == "x"
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert (tmp_path / "graph" / "closed").read_text() == "closed"
    assert first.text == "x"
