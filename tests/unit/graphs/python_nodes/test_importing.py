from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from tests.support.graph_nodes import make_node, nodes

HANDLER = "class OvmsPythonModel:\n    def execute(self, inputs):\n        return [Tensor('out', ({}).encode())]\n"


def handler(imports: str, expression: str) -> str:
    return f"from pyovms import Tensor\n{imports}\n{HANDLER.format(expression)}"


async def texts_of(folder: Path, files: dict[str, str], *handlers: str) -> list[str]:
    async with nodes(folder) as made:
        for path, source in files.items():
            made.write(path, source)
        loaded = [await made.load(make_node(path)) for path in handlers]
        return [text for node in loaded for _, _, text in await node.run_once()]


@pytest.mark.parametrize(
    ("imports", "expression"),
    [
        ("from config import NAME", "NAME"),
        ("import config", "config.NAME"),
        ("import config as c", "c.NAME"),
        ("from .config import NAME", "NAME"),
        ("from . import config", "config.NAME"),
        ("from config import *", "NAME"),
        ("from helpers.deep import NAME", "NAME"),
        ("import helpers.deep", "helpers.deep.NAME"),
        ("import helpers.deep as d", "d.NAME"),
        ("from helpers import deep", "deep.NAME"),
        ("import loose.inner", "loose.inner.NAME"),
        ("def late():\n    from config import NAME\n    return NAME", "late()"),
        ("import between", "between.NAME"),
    ],
)
async def test_handlers_import_modules_of_their_folder(tmp_path: Path, imports: str, expression: str) -> None:
    files: dict[str, str] = {}
    for folder in ("a", "b"):
        files |= {
            f"{folder}/handler.py": handler(imports, expression),
            f"{folder}/config.py": f"NAME = '{folder}'",
            f"{folder}/between.py": "from config import NAME",
            f"{folder}/helpers/__init__.py": "",
            f"{folder}/helpers/deep.py": "from config import NAME",
            f"{folder}/loose/inner.py": f"NAME = '{folder}'",
        }
    assert await texts_of(tmp_path, files, "a/handler.py", "b/handler.py") == ["a", "b"]
    assert not {"config", "between", "helpers", "loose"} & set(sys.modules)


@pytest.mark.parametrize("stem", ["code", "json", "numpy", "test", "my-handler", "class", "ovmstrio"])
async def test_handler_file_has_any_name(tmp_path: Path, stem: str) -> None:
    before = {name: sys.modules.get(name) for name in (stem, "json")}
    source = handler("import json, numpy, ovmstrio", "json.dumps([1]) + str(numpy.int8(2))")
    assert await texts_of(tmp_path, {f"{stem}.py": source}, f"{stem}.py") == ["[1]2"]
    assert {name: sys.modules.get(name) for name in before} == before


async def test_module_in_the_folder_of_the_handler_precedes_an_installed_one(tmp_path: Path) -> None:
    files = {"handler.py": handler("import colorsys, calendar", "colorsys.NAME"), "colorsys.py": "NAME = 'mine'"}
    assert await texts_of(tmp_path, files, "handler.py") == ["mine"]
    import colorsys

    assert hasattr(colorsys, "rgb_to_hls")


async def test_module_in_the_folder_of_the_handler_imports_the_loaded_handler(tmp_path: Path) -> None:
    files = {
        "handler.py": "NAME = 'once'\n" + handler("import other", "other.handler.NAME"),
        "other.py": "import handler",
    }
    assert await texts_of(tmp_path, files, "handler.py") == ["once"]


async def test_dataclasses_pickle_and_typing_find_the_handler_module(tmp_path: Path) -> None:
    source = """
    from __future__ import annotations
    import dataclasses, pickle, typing
    from pyovms import Tensor
    @dataclasses.dataclass
    class Point:
        x: int
    class OvmsPythonModel:
        def execute(self, inputs):
            again = pickle.loads(pickle.dumps(Point(3)))
            hints = typing.get_type_hints(Point)
            return [Tensor("out", f"{again.x} {hints['x'].__name__} {__file__}".encode())]
    """
    assert await texts_of(tmp_path, {"handler.py": source}, "handler.py") == [f"3 int {tmp_path / 'handler.py'}"]


async def test_each_load_reads_the_files_again(tmp_path: Path) -> None:
    source = handler("from other import B", "'{}' + B")
    for text in ("1", "2", "3"):
        files = {"handler.py": source.format(text), "other.py": f"B = '{text}'"}
        assert await texts_of(tmp_path, files, "handler.py") == [text * 2]
    assert not [folder for folder, _, files in os.walk(tmp_path) if "__pycache__" in folder]


async def test_module_written_after_a_failed_load_is_found(tmp_path: Path) -> None:
    async with nodes(tmp_path) as made:
        source = handler("from late import NAME", "NAME")
        with pytest.raises(ConfigError, match="No module named 'late'"):
            await made.load(source=source)
        made.write("late.py", "NAME = 'there'")
        assert await (await made.load(source=source)).run_once() == [(0, "out", "there")]
