"""Custom nodes in C, compiled by the tests that need them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Final

import pytest

from ovmstrio.pipelines.native.library import NodeIdentity, load_library
from tests.support.model_cache import copy_cached

INCLUDE: Final = Path(str(files("ovmstrio.pipelines") / "include"))
_PROJECT: Final = Path(__file__).parents[2]
FIXTURE_SOURCE: Final = Path(__file__).with_name("fixture_node.c")


def compiled(source: Path, output: Path, *flags: str) -> Path:
    """Compile a shared library, one of the project's own sources once per user; skip the test without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def build(folder: Path) -> None:
        command = [compiler, "-shared", "-fPIC", "-pthread", "-g", f"-I{INCLUDE}", *flags, str(source)]
        command += ["-o", str(folder / output.name)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)

    if source.is_relative_to(_PROJECT):
        headers = {header.name: header.read_bytes() for header in INCLUDE.glob("*.h")}
        key = {"source": str(source), "text": source.read_bytes(), "output": output.name, "flags": flags} | headers
        copy_cached("library", build, output.parent, {**key, "compiler": Path(compiler).resolve()})
    else:
        build(output.parent)
    return output


def copy_of_fixture(folder: Path, name: str = "libfixture.so", build: int = 0) -> Path:
    """Write the fixture library into a folder; its mode "build" adds the number ``build``."""
    with tempfile.TemporaryDirectory() as scratch:
        built = compiled(FIXTURE_SOURCE, Path(scratch) / "fixture.so", "-Wall", "-Werror", f"-DBUILD={build}")
        path = folder / name
        path.write_bytes(built.read_bytes())
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


class Account:
    def __init__(self, path: Path) -> None:
        self._library = load_library(NodeIdentity("n", path)).symbols

    def count(self, what: str) -> int:
        number: int = self._library[f"fixture_{what}"]()
        return number

    def open(self) -> None:
        self._library["fixture_open"]()

    def check(self) -> None:
        assert self.count("released") == self.count("made")
        assert self.count("unknown") == 0
        assert self.count("released_too_late") == 0
