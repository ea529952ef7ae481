"""Marks by which a change of a graph is seen: of its own file, and of the Python code that its nodes run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.repository.fingerprints import content_mark, paths_mark
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.config.specs import GraphSpec

__all__ = ["graph_mark", "python_files"]

# A file that cannot be parsed has to be watched as well, hence no parser.
_HANDLER: Final = re.compile(r"""\bhandler_path\s*:\s*(?:"([^"\n]+)"|'([^'\n]+)')""")


def graph_mark(spec: GraphSpec) -> str:
    """Give a mark of a graph that changes with its file and with the Python files in the directories of its handlers.

    Packages in those directories count as well.  What cannot be read is a state like any other.
    """
    try:
        content = read_regular_bytes(spec.graph_path)
    except OSError:
        content = b""
    directories = _handler_directories(content.decode(errors="replace"), spec.base_path)
    return content_mark(content) + paths_mark(path for directory in directories for path in python_files(directory))


def _handler_directories(text: str, base_path: Path) -> set[Path]:
    written = (double or single for double, single in _HANDLER.findall(text))
    return {(base_path / path.replace("\\", "/")).parent for path in written}


def python_files(directory: Path) -> Iterator[Path]:
    """Give the Python files of a directory and of the packages in it; none of one that cannot be read."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.suffix == ".py":
            yield entry
        elif (entry / "__init__.py").is_file():
            yield from python_files(entry)
