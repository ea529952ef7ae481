"""Storages of model files: local folders, object stores, hubs and web servers. Blocking; used in worker threads."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ovmstrio.core.errors import StorageFailure
from ovmstrio.stores.address import local_path
from ovmstrio.util.regular_files import open_regular

STALL_SECONDS: Final = 60.0
"""Default time that a storage may send nothing before a download fails."""

BLOCK_BYTES: Final = 8 * 2**20
"""Size of the pieces of a download; an interrupted download continues after the last piece."""

OnProgress = Callable[[int], None]
"""Called from any thread with the number of received bytes, negative for received bytes that were discarded."""

_QUERY: Final = re.compile(r"((?:https?|s3|gs|az)://[^\s?'\"<>]+)\?[^\s'\"<>)]*")


def ignore_progress(_: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a storage.

    Attributes:
        path: relative to the listed folder, with slashes; empty if the listed location is the file.
        location: identifier of the file for the storage.
        size: in bytes; -1 if unknown.
        mark: changes with the file's content, such as an ETag.
        modified: modification time in seconds since 1970.
        checksum: ``sha256:``, ``md5:`` or ``git:`` and hexadecimal digits; empty if the storage has none.
    """

    path: str
    location: str
    size: int
    mark: str
    modified: float
    checksum: str = ""


class ModelStorage(Protocol):
    """Storage of model files; methods block for a bounded time and are thread-safe."""

    def list_files(self, location: str) -> list[StoredFile]:
        """List all files below a folder, unordered; none if the folder does not exist.

        Raises:
            StorageFailure: the storage cannot be read.
        """
        ...

    def fetch(self, file: StoredFile, target: Path, on_progress: OnProgress) -> None:
        """Copy a file to ``target``, whose folder exists; call ``on_progress`` after each piece.

        An existing ``target`` is the start of the file: storages other than local folders continue after it.

        Raises:
            StorageFailure: the file cannot be read or no longer exists.
        """
        ...

    def close(self) -> None:
        """Close connections; called once, with no other call running."""
        ...


class LocalStorage:
    """Local folders, given as paths or ``file://`` URLs."""

    def list_files(self, location: str) -> list[StoredFile]:
        """List all files below a folder; see :meth:`ModelStorage.list_files`."""
        root = local_path(location)
        found: list[StoredFile] = []
        try:
            if root.is_file():
                return [_describe(root, "")]
            for path in _walk(root):
                with suppress(FileNotFoundError):  # a dangling link, or a file removed meanwhile
                    found.append(_describe(path, path.relative_to(root).as_posix()))
        except OSError as error:
            raise StorageFailure(f"{location} cannot be read: {error}") from error
        return found

    def fetch(self, file: StoredFile, target: Path, on_progress: OnProgress) -> None:
        """Copy a file; see :meth:`ModelStorage.fetch`."""
        try:
            with open_regular(file.location) as source, target.open("wb") as copy:
                while piece := source.read(BLOCK_BYTES):
                    copy.write(piece)
                    on_progress(len(piece))
        except OSError as error:
            raise StorageFailure(f"{file.location} cannot be copied: {error}") from error

    def close(self) -> None:
        """Do nothing."""


def redact(text: str) -> str:
    """Return a text without queries and passwords of URLs, which may be signatures, and without other secrets."""
    from ovmstrio.util.redaction import blanked  # noqa: PLC0415 - its patterns take 3 ms of each start

    return blanked(_QUERY.sub(r"\1", text).encode())


def reason_of(error: BaseException) -> str:
    """Return the type and text of a client's error, without secrets."""
    text = redact(str(error)).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_file(path: Path, file: StoredFile) -> None:
    """Check the size and checksum of a downloaded file.

    Raises:
        StorageFailure: they differ.
    """
    size = path.stat().st_size
    if file.size not in {-1, size}:
        raise StorageFailure(f"{redact(file.location)} is damaged: expected {file.size} bytes, got {size}")
    kind, _, expected = file.checksum.partition(":")
    if not expected:
        return
    digest: Any = hashlib.new("sha1" if kind == "git" else kind, usedforsecurity=False)
    if kind == "git":
        digest.update(f"blob {size}\0".encode())
    with path.open("rb") as content:
        while piece := content.read(BLOCK_BYTES):
            digest.update(piece)
    if digest.hexdigest() != expected:
        got = digest.hexdigest()
        raise StorageFailure(f"{redact(file.location)} is damaged: expected {file.checksum}, got {kind}:{got}")


def _describe(path: Path, relative: str) -> StoredFile:
    stat = path.stat()
    mark = f"{stat.st_mtime_ns}-{stat.st_ino}"
    return StoredFile(relative, str(path), stat.st_size, mark, stat.st_mtime_ns / 1e9)


def _walk(root: Path) -> Iterator[Path]:
    """Return the files below a folder; follow links to folders, but no cycle of links."""
    seen: set[str] = set()
    for folder, names, files in os.walk(root, onerror=_raise_unless_missing, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in files)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
