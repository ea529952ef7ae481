"""Open and close of Python nodes when clients leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.python_nodes import Node, nodes
from tests.support.waits import until_async

PAIRED = """
import time
from pathlib import Path
FOLDER = Path(__file__).parent
class OvmsPythonModel:
    {prefix}def open(self, context):
        with (FOLDER / "opened").open("a") as file:
            file.write("x")
        {wait}
    def execute(self, inputs):
        return []
    {prefix}def close(self, context):
        with (FOLDER / "closed").open("a") as file:
            file.write("x")
"""


@pytest.mark.parametrize("place", ["threads", "loop", "processes"])
async def test_a_close_comes_if_and_only_if_an_open_has_begun(tmp_path: Path, place: str) -> None:
    """Also when clients leave within a moment, most of them before there is a thread for them."""
    is_async = place == "loop"
    source = PAIRED.format(
        prefix="async " if is_async else "",
        wait="import trio; await trio.sleep(0.002)" if is_async else "time.sleep(0.002)",
    )
    isolation = Isolation(processes=2) if place == "processes" else None

    async def come_and_leave(node: Node, seconds: float) -> None:
        with trio.move_on_after(seconds):
            async with node.opened():
                await trio.sleep_forever()

    async with nodes(tmp_path, isolation=isolation, limit=2) as made:
        node = await made.load(source=source)
        async with trio.open_nursery() as nursery:
            for number in range(150):
                nursery.start_soon(come_and_leave, node, number % 40 / 4000)
        # On a busy machine all of these may have left before a thread was free.
        async with node.opened():
            await until_async((tmp_path / "opened").exists)
    opened, closed = ((tmp_path / name).read_text() for name in ("opened", "closed"))
    assert len(opened) == len(closed) > 0
