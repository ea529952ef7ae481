"""Python nodes under an interpreter of their own."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, Overloaded
from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.python_nodes import make_node, nodes

SOURCE = """
import sys
import only_here
from ovmstrio.errors import Overloaded
class OvmsPythonModel:
    def execute(self, inputs):
        if inputs[0].size:
            raise Overloaded(only_here.NAME, retry_after_seconds=3)
        return self.all()
    def all(self):
        for package in ("trio", "structlog", "pydantic"):
            try:
                __import__(package)
            except ImportError as error:
                yield [Tensor("out", str(error).encode())]
        yield [Tensor("out", f"{only_here.NAME} {sys.prefix}".encode())]
"""


def environment(folder: Path, *, has_numpy: bool = True) -> Path:
    """Make an environment with a package of its own, and one that fits no server; give its interpreter."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "only_here.py").write_text("NAME = 'only here'")
    (packages / "structlog.py").write_text("raise ImportError('fits no server')")
    if has_numpy:
        home = Path(np.__file__).parents[1]
        for name in ("numpy", "numpy.libs"):
            if (home / name).exists():
                (packages / name).symlink_to(home / name)
    return folder / "bin" / "python"


async def test_a_node_has_the_packages_of_its_own_environment(tmp_path: Path) -> None:
    """And none of the server's, but for what nodes import from it; errors and generators pass as ever."""
    isolation = Isolation(python=environment(tmp_path / "venv"))
    async with nodes(tmp_path, isolation=isolation) as made:
        node = await made.load(make_node(generative=True), SOURCE)
        async with node.opened() as opened:
            said = [text for call in await opened.generate() for _, _, text in call.texts]
            with capture_logs(), pytest.raises(Overloaded, match=r"^only here$") as raised:
                await opened.run(b"x")
    assert said == [
        "No module named 'trio'",
        "fits no server",
        "No module named 'pydantic'",
        f"only here {tmp_path / 'venv'}",
    ]
    assert raised.value.retry_after_seconds == 3


async def test_async_code_asks_for_trio(tmp_path: Path) -> None:
    """Where the environment has none."""
    source = "class OvmsPythonModel:\n    async def execute(self, inputs):\n        return []\n"
    async with nodes(tmp_path, isolation=Isolation(python=environment(tmp_path / "venv"))) as made:
        node = await made.load(source=source)
        with capture_logs(), pytest.raises(Exception, match="No module named 'trio'"):
            await node.run_once()


async def test_an_environment_without_numpy_is_told_what_it_lacks(tmp_path: Path) -> None:
    """When the graph is loaded."""
    isolation = Isolation(python=environment(tmp_path / "venv", has_numpy=False))
    async with nodes(tmp_path, isolation=isolation) as made:
        with capture_logs(), pytest.raises(ConfigError, match="its interpreter has no numpy, which pyovms needs"):
            await made.load(source="class OvmsPythonModel:\n    def execute(self, inputs):\n        return []\n")


async def test_an_interpreter_that_cannot_be_run_is_a_problem(tmp_path: Path) -> None:
    """Of the node."""
    async with nodes(tmp_path, isolation=Isolation(python=tmp_path / "nothing")) as made:
        with capture_logs(), pytest.raises(ConfigError, match="No such file or directory"):
            await made.load(source="class OvmsPythonModel:\n    def execute(self, inputs):\n        return []\n")
