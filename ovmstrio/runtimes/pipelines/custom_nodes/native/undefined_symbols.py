"""A symbol that a library uses and nobody has: what it is called in its source, and the file it is likely to be in."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Final

from ovmstrio.util.regular_files import open_regular

__all__ = ["UndefinedSymbol", "undefined_symbol"]

_UNDEFINED: Final = re.compile(r"^(?P<library>.*?): (?:undefined symbol|symbol lookup error): (?P<symbol>[^\s,]+)")
_SOURCES: Final = frozenset({".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".inl"})
_MOST_FILES: Final = 200
_LONGEST_FILE: Final = 2**20
_DEMANGLE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class UndefinedSymbol:
    """A symbol, readable; the library that lacks it; where sources beside that define it, or else use it."""

    name: str
    library: Path
    defined: str = ""
    used: str = ""

    @property
    def detail(self) -> str:
        """What is wrong, and where."""
        where = f", which is defined in {self.defined}" if self.defined else f" ({self.used})" if self.used else ""
        return f"{self.library.name} uses {self.name}{where}, and nothing that it is linked with has that"

    @property
    def suggestion(self) -> str:
        """The way out."""
        missing = Path(self.defined.rpartition(":")[0]).name if self.defined else "the file or library that has it"
        return f"link it with {missing}; `ovms custom-node build DIRECTORY` takes all sources of a directory"


def undefined_symbol(message: str, path: Path) -> UndefinedSymbol | None:
    """Read the dynamic loader's message on a library; None if it speaks of something else.  Blocking."""
    found = _UNDEFINED.search(message)
    if found is None:
        return None
    name = _demangled(found["symbol"])
    # It may be one of those that the library needs in turn.
    library = Path(found["library"]) if found["library"] else path
    return UndefinedSymbol(name, library, *_find(_plain(name), library.parent))


def _demangled(symbol: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None or not symbol.startswith("_Z"):
        return symbol
    try:
        told = subprocess.run(  # noqa: S603 - found on the path, and given an argument only
            [tool, symbol], capture_output=True, text=True, check=False, timeout=_DEMANGLE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return symbol
    return told.stdout.strip() or symbol


def _plain(name: str) -> str:
    """Give the word that a source has of a name: ``method`` of ``space::Class<int>::method(int) const``."""
    before_arguments = re.sub(r"<[^<>]*>", "", name.partition("(")[0])
    return before_arguments.rpartition("::")[2].rpartition(" ")[2]


def _find(word: str, folder: Path) -> tuple[str, str]:
    """Look for a function in the sources of a folder: where it is defined, and where it is used, both may be empty."""
    if not re.fullmatch(r"\w+", word):
        return "", ""
    definition = re.compile(rf"\b{word}\s*\([^;{{}}]*\)[\w\s]*\{{")
    use = re.compile(rf"\b{word}\b")
    used = ""
    for file, text in _sources(folder):
        defined = definition.search(text)
        if defined is not None:
            return _place(file, text, defined.start()), used
        seen = None if used else use.search(text)
        if seen is not None:
            used = _place(file, text, seen.start())
    return "", used


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    try:
        files = sorted(islice((each for each in folder.iterdir() if each.suffix in _SOURCES), _MOST_FILES))
    except OSError:
        return
    for file in files:
        try:
            with TextIOWrapper(open_regular(file), encoding="utf-8", errors="replace") as opened:
                yield file, opened.read(_LONGEST_FILE)
        except OSError:
            continue


def _place(file: Path, text: str, position: int) -> str:
    return f"{file}:{text.count(chr(10), 0, position) + 1}"
