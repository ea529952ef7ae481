"""Handlers and their helper modules do not get in each other's way."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from tests.support.python_nodes import make_node, nodes

SAY = "class OvmsPythonModel:\n    def execute(self, inputs):\n        return [Tensor('out', ({}).encode())]\n"


def handler(imports: str, expression: str) -> str:
    """Write a handler that says the value of an expression."""
    return f"{imports}\n{SAY.format(expression)}"


async def said(folder: Path, *handlers: str, **files: str) -> list[str]:
    """Load handlers by path and give what they say."""
    async with nodes(folder) as made:
        for path, source in files.items():
            made.write(path.replace("__", "/") + ".py", source)
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
async def test_siblings_of_equal_names_are_kept_apart(tmp_path: Path, imports: str, expression: str) -> None:
    """Two graphs whose files are called the same see their own, however they import them."""
    files: dict[str, str] = {}
    for folder in ("a", "b"):
        name = f"NAME = '{folder}'"
        files |= {
            f"{folder}__handler": "from pyovms import Tensor\n" + handler(imports, expression),
            f"{folder}__config": name,
            f"{folder}__between": "from config import NAME",
            f"{folder}__helpers____init__": "",
            f"{folder}__helpers__deep": "from config import NAME",
            f"{folder}__loose__inner": name,
        }
    files = {path.replace("____init__", "__INIT"): text for path, text in files.items()}
    async with nodes(tmp_path) as made:
        for path, source in files.items():
            made.write(path.replace("__", "/").replace("INIT", "__init__") + ".py", source)
        loaded = [await made.load(make_node(f"{folder}/handler.py")) for folder in ("a", "b")]
        answers = [text for node in loaded for _, _, text in await node.run_once()]
    assert answers == ["a", "b"]
    assert not {"config", "between", "helpers", "loose"} & set(sys.modules)


@pytest.mark.parametrize("stem", ["code", "json", "numpy", "test", "my-handler", "class", "ovmstrio"])
async def test_a_handler_may_be_called_like_anything(tmp_path: Path, stem: str) -> None:
    """Also like a module of the standard library that it imports itself; nobody else gets it."""
    before = {name: sys.modules.get(name) for name in (stem, "json")}
    source = handler("import json, numpy, ovmstrio", "json.dumps([1]) + str(numpy.int8(2))")
    files = {stem: "from pyovms import Tensor\n" + source}
    assert await said(tmp_path, f"{stem}.py", **files) == ["[1]2"]
    assert {name: sys.modules.get(name) for name in before} == before


async def test_siblings_go_before_what_is_installed(tmp_path: Path) -> None:
    """As for scripts; other modules still get what is installed."""
    files = {
        "handler": "from pyovms import Tensor\n" + handler("import colorsys, calendar", "colorsys.NAME"),
        "colorsys": "NAME = 'mine'",
    }
    assert await said(tmp_path, "handler.py", **files) == ["mine"]
    import colorsys

    assert hasattr(colorsys, "rgb_to_hls")


async def test_siblings_may_import_the_handler(tmp_path: Path) -> None:
    """And get the module that is loaded, not another."""
    files = {
        "handler": "NAME = 'once'\nfrom pyovms import Tensor\n" + handler("import beside", "beside.handler.NAME"),
        "beside": "import handler",
    }
    assert await said(tmp_path, "handler.py", **files) == ["once"]


async def test_a_module_is_what_libraries_expect(tmp_path: Path) -> None:
    """Dataclasses, pickle and typing look modules up by name."""
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
    async with nodes(tmp_path) as made:
        made.write("handler.py", source)
        ((_, _, text),) = await (await made.load()).run_once()
    assert text == f"3 int {tmp_path / 'handler.py'}"


async def test_a_load_runs_the_files_as_they_are_now(tmp_path: Path) -> None:
    """A change within the same second, of the same length, in the handler or beside it."""
    source = "from pyovms import Tensor\n" + handler("from beside import B", "'{}' + B")
    answers = []
    async with nodes(tmp_path) as made:
        for text in ("1", "2", "3"):
            made.write("handler.py", source.format(text))
            made.write("beside.py", f"B = '{text}'")
            answers.append(await (await made.load()).run_once())
    assert [text for ((_, _, text),) in answers] == ["11", "22", "33"]
    assert not [folder for folder, _, files in os.walk(tmp_path) if "__pycache__" in folder]


async def test_a_sibling_that_appears_later_is_found(tmp_path: Path) -> None:
    """A failed load leaves nothing that stands in the way of the next."""
    async with nodes(tmp_path) as made:
        source = handler("from late import NAME", "NAME")
        with pytest.raises(ConfigError, match="No module named 'late'"):
            await made.load(source=source)
        made.write("late.py", "NAME = 'there'")
        assert await (await made.load(source=source)).run_once() == [(0, "out", "there")]
