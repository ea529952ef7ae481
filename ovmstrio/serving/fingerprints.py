"""Marks by which a change on disk is seen.

A file that is read whole anyway is known by its content; a version's directory, which may hold gigabytes, by the
names, sizes and times of its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.config.specs import GraphSpec

__all__ = ["content_mark", "graph_mark", "paths_mark", "python_files", "rows_mark", "tree_mark"]

# ----------------------------------------------------------------------
# Marks by which a change on disk is seen
# ----------------------------------------------------------------------


def content_mark(data: bytes) -> str:
    """Give a mark of a file's content, so that a rewrite of the same text is no change."""
    return hashlib.sha256(data).hexdigest()


def tree_mark(path: Path) -> str:
    """Give a mark of a file, or of all files below a directory, that changes when any of them does.

    What cannot be read, vanishes meanwhile or is not there is a state like any other.  Links to directories are not
    followed, so that a circle of them does no harm.
    """
    return rows_mark((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in _files(str(path)))


def paths_mark(paths: Iterable[Path]) -> str:
    """Give a mark of several files, as :func:`tree_mark` does of one."""
    return rows_mark((path, tree_mark(path)) for path in set(paths))


def rows_mark(rows: Iterable[tuple[object, ...]]) -> str:
    """Give a mark of what is told of files, a row each, in whatever order they come."""
    digest = hashlib.sha256()
    for row in sorted("\0".join(map(str, row)) for row in rows):
        digest.update(f"{row}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        with os.scandir(path) as found:
            entries = list(found)
    except NotADirectoryError:
        with contextlib.suppress(OSError):
            yield path, os.stat(path)  # noqa: PTH116 - paths are plain texts here, as `scandir` gives them
        return
    except (OSError, ValueError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            with contextlib.suppress(OSError):
                yield entry.path, entry.stat()


# ----------------------------------------------------------------------
# Marks by which a change of a graph is seen: of its own file, and of the Python code that its nodes run
# ----------------------------------------------------------------------

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
