"""Marks by which a change on disk is seen.

A file that is read whole anyway is known by its content; a version's directory, which may hold gigabytes, by the
names, sizes and times of its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["content_mark", "tree_mark"]


def content_mark(data: bytes) -> str:
    """Give a mark of a file's content, so that a rewrite of the same text is no change."""
    return hashlib.sha256(data).hexdigest()


def tree_mark(path: Path) -> str:
    """Give a mark of a file, or of all files below a directory, that changes when any of them does.

    What cannot be read, vanishes meanwhile or is not there is a state like any other.  Links to directories are not
    followed, so that a circle of them does no harm.
    """
    digest = hashlib.sha256()
    for name, stat in sorted(_files(str(path))):
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        with os.scandir(path) as found:
            entries = list(found)
    except NotADirectoryError:
        yield path, os.stat(path)  # noqa: PTH116 - paths are plain texts here, as `scandir` gives them
        return
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            with contextlib.suppress(OSError):
                yield entry.path, entry.stat()
