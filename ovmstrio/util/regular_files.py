"""Functions that open and read regular files, and never block on a FIFO or device.

Every path from an operator or a client is opened here.  ``open()`` of a FIFO waits for a writer, and nothing can
interrupt that wait; reading a device such as ``/dev/zero`` does not end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard, cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedRandom

MAX_DOCUMENT_BYTES: Final = 64 * 2**20
"""Size limit of a configuration document."""

_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
}


def file_kind(mode: int) -> str:
    """Return the name of a file type, such as ``a FIFO``, of ``st_mode``."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def is_shortage(error: Exception) -> TypeGuard[OSError]:
    """Return whether the cause of a failed file operation is a lack of descriptors or memory, not the path."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def is_file(path: Path) -> bool:
    """Return whether a path leads to a regular file; False if the system cannot look the path up.

    ``Path.is_file`` of some Python versions raises an error for a folder without permission or an overlong name.
    """
    return os.path.isfile(path)  # noqa: PTH113 - see above


def is_folder(path: Path) -> bool:
    """Return whether a path leads to a folder; see :func:`is_file`."""
    return os.path.isdir(path)  # noqa: PTH112 - as above


def check_regular(path: Path | str) -> None:
    """Raise unless a path leads to a regular file.  Links are followed.

    Raises:
        OSError: the file does not exist, no file can have the path, or it has another type; ``strerror`` names the
            type.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - takes strings as well
    except ValueError as error:  # such as a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    _check_mode(mode, path)


def open_regular(path: Path | str, flags: int = os.O_RDONLY, permissions: int = 0o666) -> BufferedRandom:
    """Open a regular file without blocking.

    Args:
        path: of the file; links are followed unless ``flags`` says otherwise.
        flags: as of ``os.open``.
        permissions: of a file that ``O_CREAT`` creates, less the umask.

    Raises:
        OSError: the file cannot be opened, or has another type.
    """
    try:
        # A FIFO or device is not opened at all: opening a device can have effects, and a FIFO would gain a reader.
        check_regular(path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, permissions)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)
        mode = {os.O_RDONLY: "rb", os.O_WRONLY: "wb", os.O_RDWR: "r+b"}[flags & os.O_ACCMODE]
        return cast("BufferedRandom", os.fdopen(descriptor, mode))
    except BaseException:
        os.close(descriptor)
        raise


def read_regular_bytes(path: Path | str, max_bytes: int | None = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        path: of the file.
        max_bytes: size limit; None for no limit.

    Raises:
        OSError: the file cannot be read, has another type, or is larger than ``max_bytes``.
    """
    with open_regular(path) as file:
        if max_bytes is None:
            return file.read()
        _check_size(os.fstat(file.fileno()).st_size, max_bytes, path)
        # Files of /proc have no size, and others may grow.
        content = file.read(max_bytes + 1)
        _check_size(len(content), max_bytes, path)
        return content


def read_regular_text(
    path: Path | str, encoding: str = "utf-8", errors: str = "strict", max_bytes: int | None = MAX_DOCUMENT_BYTES
) -> str:
    """Return the text of a regular file, with line feeds as its line ends.

    Raises:
        OSError: as :func:`read_regular_bytes`.
        UnicodeDecodeError: the file has another encoding.
    """
    text = read_regular_bytes(path, max_bytes).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def find_irregular(folder: Path) -> tuple[Path, str] | None:
    """Find a FIFO, socket or device below a folder; links are followed, but not into folders.

    Returns:
        The path and its type; None if all entries are regular files, folders or dangling links.

    Raises:
        OSError: a folder cannot be read.
    """
    for path, mode in _entries(folder):
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return path, file_kind(mode)
    return None


def _entries(folder: Path) -> Iterator[tuple[Path, int]]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))
            continue
        try:
            yield Path(entry.path), entry.stat().st_mode
        except OSError:
            continue


def _check_mode(mode: int, path: Path | str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"expected a regular file, got {file_kind(mode)}", str(path))


def _check_size(size: int, max_bytes: int, path: Path | str) -> None:
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"expected at most {max_bytes} bytes, got {size}", str(path))
