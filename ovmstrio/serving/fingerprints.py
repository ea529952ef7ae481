"""Fingerprints of files, for change detection.

Small files are fingerprinted by content; version directories, which may hold gigabytes, by names, sizes and times.
Missing and unreadable files are a state like any other. A lack of descriptors or memory is not: it raises OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.util.regular_files import is_file, is_shortage, read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.config.specs import GraphSpec


def content_fingerprint(data: bytes) -> str:
    """Return the fingerprint of a file's content; rewriting the same content is no change."""
    return hashlib.sha256(data).hexdigest()


def tree_fingerprint(path: Path) -> str:
    """Return the fingerprint of a file, or of all files below a directory; missing and unreadable files are allowed.

    Links to directories are not followed, because they may form circles.
    """
    return rows_fingerprint((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in _files(str(path)))


def paths_fingerprint(paths: Iterable[Path]) -> str:
    """Return the fingerprint of several files or directories."""
    return rows_fingerprint((path, tree_fingerprint(path)) for path in set(paths))


def rows_fingerprint(rows: Iterable[tuple[object, ...]]) -> str:
    """Return the fingerprint of rows in any order."""
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
            yield path, os.stat(path)  # noqa: PTH116 - `scandir` returns paths as str
        return
    except (OSError, ValueError) as error:
        if is_shortage(error):
            raise
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            with contextlib.suppress(OSError):
                yield entry.path, entry.stat()


# No parser, because a graph file with syntax errors must be watched, too.
_HANDLER_PATH: Final = re.compile(r"""\bhandler_path\s*:\s*(?:"([^"\n]+)"|'([^'\n]+)')""")


def graph_fingerprint(spec: GraphSpec) -> str:
    """Return the fingerprint of a graph file and of the Python files in its handlers' directories and packages."""
    try:
        content = read_regular_bytes(spec.graph_path)
    except OSError as error:
        if is_shortage(error):
            raise
        content = b""
    directories = _handler_directories(content.decode(errors="replace"), spec.base_path)
    return content_fingerprint(content) + paths_fingerprint(
        path for directory in directories for path in python_files(directory)
    )


def _handler_directories(text: str, base_path: Path) -> set[Path]:
    paths = (double or single for double, single in _HANDLER_PATH.findall(text))
    return {(base_path / path.replace("\\", "/")).parent for path in paths}


def python_files(directory: Path) -> Iterator[Path]:
    """Yield the Python files of a directory and of its packages; none for an unreadable one."""
    try:
        entries = list(directory.iterdir())
    except (OSError, ValueError) as error:
        if is_shortage(error):
            raise
        return
    for entry in entries:
        if entry.suffix == ".py":
            yield entry
        elif is_file(entry / "__init__.py"):
            yield from python_files(entry)
