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


def write_environment(folder: Path, *, has_numpy: bool = True) -> Path:
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


async def test_node_has_the_packages_of_its_environment(tmp_path: Path) -> None:
    isolation = Isolation(python=write_environment(tmp_path / "venv"))
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


async def test_async_code_needs_trio(tmp_path: Path) -> None:
    source = "class OvmsPythonModel:\n    async def execute(self, inputs):\n        return []\n"
    async with nodes(tmp_path, isolation=Isolation(python=write_environment(tmp_path / "venv"))) as made:
        node = await made.load(source=source)
        with capture_logs(), pytest.raises(Exception, match="No module named 'trio'"):
            await node.run_once()


@pytest.mark.parametrize(
    ("has_numpy", "python", "text"),
    [
        (False, "venv/bin/python", "its interpreter has no numpy, which pyovms needs"),
        (True, "missing", "No such file or directory"),
    ],
)
async def test_unusable_interpreter_is_a_problem_of_the_node(
    tmp_path: Path, has_numpy: bool, python: str, text: str
) -> None:
    write_environment(tmp_path / "venv", has_numpy=has_numpy)
    async with nodes(tmp_path, isolation=Isolation(python=tmp_path / python)) as made:
        with capture_logs(), pytest.raises(ConfigError, match=text):
            await made.load(source="class OvmsPythonModel:\n    def execute(self, inputs):\n        return []\n")
