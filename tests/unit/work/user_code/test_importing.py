"""Modules of users: what is left when they are unloaded, whatever others import meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ovmstrio.work.user_code.importing import HandlerPackage


def test_modules_are_unloaded_while_others_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads import at any moment; here while the names of modules are compared."""

    class ImportingName(str):
        __slots__ = ()

        def startswith(self, *_: object) -> bool:
            monkeypatch.setitem(sys.modules, f"{self}{len(sys.modules)}", ModuleType("imported"))
            return False

    (tmp_path / "code.py").write_text("from . import beside\n")
    (tmp_path / "beside.py").write_text("")
    package = HandlerPackage(tmp_path)
    made = package.load(tmp_path / "code.py").__name__
    monkeypatch.setitem(sys.modules, ImportingName("a_name_of_others"), ModuleType("others"))
    package.unload()
    assert not {name for name in list(sys.modules) if str.startswith(name, made.rpartition(".")[0])}
