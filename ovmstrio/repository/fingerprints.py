"""Marks by which a change on disk is seen.

A file that is read whole anyway is known by its content; a version's directory, which may hold gigabytes, by the
names, sizes and times of its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["content_mark", "paths_mark", "rows_mark", "tree_mark"]


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
