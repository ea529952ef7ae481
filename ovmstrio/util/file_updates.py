"""Updates of small files that a server watches: one writer at a time, and with the owner and the mode of the file."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.util.regular_files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_PLACE: Final = frozenset({errno.EBUSY, errno.EACCES, errno.EPERM})
"""Errors for which a file is written in place: it is a mount point, or its folder belongs to another user."""


@contextmanager
def lock_folder(file: Path) -> Iterator[None]:
    """Lock the folder of a file, so that concurrent commands do not overwrite each other's changes; blocking.

    Raises:
        OSError: the folder cannot be opened.
    """
    folder = os.open(file.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Network file systems may not support locks.
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def replace_text(file: Path, text: str, *, new_mode: int) -> None:
    """Replace the content of a file, atomically if its folder permits; blocking.

    A symbolic link stays a link: its target is replaced.

    Args:
        file: the file, which may be missing.
        text: the new content.
        new_mode: permissions of a new file; those of an existing file stay.

    Raises:
        OSError: the file cannot be written.
    """
    place = file.resolve()
    try:
        _replace(place, text, new_mode)
    except OSError as error:
        if error.errno not in _IN_PLACE or not place.exists():
            raise
        with open_regular(place, os.O_WRONLY | os.O_TRUNC) as written:
            written.write(text.encode())


def _replace(file: Path, text: str, new_mode: int) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}") as folder:
        made = Path(folder) / file.name
        with made.open("wb") as written:
            written.write(text.encode())
            written.flush()
            os.fsync(written.fileno())
        _copy_owner_and_mode(file, made, new_mode)
        made.replace(file)


def _copy_owner_and_mode(file: Path, made: Path, new_mode: int) -> None:
    try:
        was = file.stat()
    except FileNotFoundError:
        made.chmod(new_mode)
        return
    with suppress(PermissionError):
        os.chown(made, was.st_uid, was.st_gid)
    made.chmod(stat.S_IMODE(was.st_mode))
