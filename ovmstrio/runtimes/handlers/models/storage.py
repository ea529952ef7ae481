"""Where models come from: local folders, and through fsspec everything that it knows a URL for.

Everything here blocks and belongs in worker threads.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from ovmstrio.core.errors import ConfigError, Problem, StorageFailure
from ovmstrio.core.extras import Extra, way_to_install
from ovmstrio.runtimes.handlers.models.tree import StoredFile
from ovmstrio.util.regular_files import open_regular

__all__ = [
    "STALL_SECONDS",
    "LocalStorage",
    "ModelStorage",
    "Moved",
    "OpenStorage",
    "local_path",
    "open_storage",
    "scheme_of",
]

_PACKAGES: Final = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}
_PIECE_BYTES: Final = 8 * 2**20
STALL_SECONDS: Final = 60.0
"""How long a storage may give nothing, unless a project says otherwise."""


class ModelStorage(Protocol):
    """Where files are listed and fetched; its methods block, for a bounded time, and may be called from any thread."""

    def list_files(self, location: str) -> list[StoredFile]:
        """List all files below a folder, in no order; none if it is not there.

        Raises:
            StorageFailure: it cannot be read.
        """
        ...

    def fetch(self, file: StoredFile, target: Path, moved: Moved) -> None:
        """Copy a file; ``target``'s folder exists, and ``moved`` is called whenever a piece has come.

        Raises:
            StorageFailure: it cannot be read, or is not there any more.
        """
        ...

    def close(self) -> None:
        """Close connections.  Called once, when nothing else is under way."""
        ...


Moved = Callable[[], None]
"""Is told that a piece of a file has come; from any thread."""

OpenStorage = Callable[[str], ModelStorage]
"""Opens what a location is in."""


class LocalStorage:
    """Folders of this computer, given as paths or as ``file://`` URLs."""

    def list_files(self, location: str) -> list[StoredFile]:
        """List all files below a folder; as :meth:`ModelStorage.list_files`."""
        root = local_path(location)
        found: list[StoredFile] = []
        try:
            if root.is_file():
                return [_describe(root, "")]
            for path in _walk(root):
                with suppress(FileNotFoundError):  # a link to nothing, or a file that goes just now
                    found.append(_describe(path, path.relative_to(root).as_posix()))
        except OSError as error:
            raise StorageFailure(f"{location} cannot be read: {error}") from error
        return found

    def fetch(self, file: StoredFile, target: Path, moved: Moved) -> None:
        """Copy a file; as :meth:`ModelStorage.fetch`."""
        try:
            with open_regular(file.location) as source, target.open("wb") as copy:
                while piece := source.read(_PIECE_BYTES):
                    copy.write(piece)
                    moved()
        except OSError as error:
            raise StorageFailure(f"{file.location} cannot be copied: {error}") from error

    def close(self) -> None:
        """Do nothing, as there are no connections."""


def open_storage(location: str, stall_seconds: float = STALL_SECONDS) -> ModelStorage:
    """Open what a location is in; every attempt to read there ends when nothing has come for some time.

    Raises:
        ConfigError: the library that reads such URLs is not installed.
    """
    scheme = scheme_of(location)
    if scheme in {"", "file"}:
        return LocalStorage()
    package = _PACKAGES.get(scheme, "")
    try:
        if package:
            importlib.import_module(package)
        remote = importlib.import_module("ovmstrio.runtimes.handlers.models.remote")
        storage: ModelStorage = remote.FsspecStorage(scheme, stall_seconds)
    except (ImportError, ValueError) as error:
        extra = way_to_install(Extra.S3) if package == "s3fs" else f"pip install {package or 'its fsspec package'}"
        message = f"URLs that begin with {scheme}:// cannot be read here: {error}"
        raise ConfigError([Problem(message, found=location, suggestion=extra)]) from error
    return storage


def scheme_of(location: str) -> str:
    """Give the scheme of a URL, empty for a path."""
    scheme, mark, _ = location.partition("://")
    return scheme.lower() if mark else ""


def local_path(location: str) -> Path:
    """Give the path of a folder that is written as one, or as a ``file://`` URL."""
    return Path(unquote(urlsplit(location).path)) if scheme_of(location) == "file" else Path(location)


def _describe(path: Path, relative: str) -> StoredFile:
    stat = path.stat()
    mark = f"{stat.st_mtime_ns}-{stat.st_ino}"
    return StoredFile(relative, str(path), stat.st_size, mark, stat.st_mtime_ns / 1e9)


def _walk(root: Path) -> Iterator[Path]:
    """Give the files below a folder; links to folders are followed, as those who load a model do, but in no circle."""
    seen: set[str] = set()
    for folder, names, files in os.walk(root, onerror=_raise_unless_gone, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in files)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
