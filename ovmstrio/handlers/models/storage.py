"""Where models come from: local folders, and through fsspec everything that it knows a URL for.

Everything here blocks and belongs in worker threads.
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from ovmstrio.core.errors import ConfigError, Problem, StorageFailure
from ovmstrio.core.tracing import NO_ATTRIBUTES, Attributes, part_of_server
from ovmstrio.handlers.config.project_spec import ModelsSpec
from ovmstrio.handlers.models.version_index import ModelKey, StoredFile, VersionFiles, models_below, versions_of
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.regular_files import open_regular

__all__ = [
    "STALL_SECONDS",
    "Copy",
    "CopyMaker",
    "LocalStorage",
    "ModelSource",
    "ModelStorage",
    "Moved",
    "OpenStorage",
    "local_path",
    "open_sources",
    "open_storage",
    "problem_of_saved_model",
    "scheme_of",
]

# ----------------------------------------------------------------------
# Where models come from: local folders, and through fsspec everything that it knows a URL for
# ----------------------------------------------------------------------

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
        from ovmstrio.handlers.models.remote_storage import FsspecStorage  # noqa: PLC0415 - fsspec is an extra

        storage: ModelStorage = FsspecStorage(scheme, stall_seconds)
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


# ----------------------------------------------------------------------
# The places that a project takes its models from, and what is in them
# ----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Copy:
    """A version's files on the local disk; equal to itself alone.

    Attributes:
        key: what it is a copy of.
        fingerprint: of the files when they were listed.
        folder: where the files are.
        uses: how many calls and loads need the files.
    """

    key: ModelKey
    fingerprint: str
    folder: Path
    uses: int = 0


def _nothing() -> None:
    """Stand for somebody who wants to know."""


def _asking(name: str, location: str, about: Attributes = NO_ATTRIBUTES) -> AbstractContextManager[object]:
    """Give a span of what is asked of a storage; nothing of one that is a folder of this computer."""
    if scheme_of(location) in {"", "file"}:
        return nullcontext()
    # What stands before the host, or behind the path, may be secret.
    url = urlsplit(location)
    place = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return part_of_server(name, {"url.full": place, "url.scheme": url.scheme, **about})


class CopyMaker:
    """Makes copies; safe from any thread.  It blocks, and belongs in worker threads.

    Args:
        root: the folder where they are kept.
        sources: where versions are copied from.
    """

    def __init__(self, root: Path, sources: Sequence[ModelSource]) -> None:
        self._root = root
        self._sources = sources
        self._numbers = itertools.count(1)

    def make(self, key: ModelKey, version: VersionFiles, moved: Moved = _nothing) -> Copy:
        """Copy all files of a version out of its storage; ``moved`` is told of every piece.

        Raises:
            StorageFailure: a file cannot be read from there, or not be written here; nothing is left of the copy.
        """
        source = next(source for source in self._sources if source.has(key))
        number = str(next(self._numbers))
        unfinished, place = self._root / f"{number}.part", self._root / number
        try:
            targets = {unfinished / key.name / key.version / file.path: file for file in version.files}
            for folder in {target.parent for target in targets}:
                folder.mkdir(parents=True, exist_ok=True)
            about = {"ovmstrio.model.name": key.name, "ovmstrio.model.version": key.version}
            with _asking("fetch model", source.location, about):
                for target, file in targets.items():
                    source.storage.fetch(file, target, moved)
            unfinished.rename(place)
        except OSError as error:
            raise StorageFailure(f"{key} cannot be kept below {self._root}: {error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return Copy(key, version.fingerprint, place / key.name / key.version)

    def remove(self, copy: Copy) -> None:
        """Remove a copy's files."""
        shutil.rmtree(copy.folder.parent.parent, ignore_errors=True)


_GRAPH: Final = "saved_model.pb"
_VARIABLES: Final = "variables/"
_INDEX: Final = "variables/variables.index"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A folder of one model, or of many if it has no ``name``."""

    name: str | None
    location: str
    storage: ModelStorage

    def read(self) -> dict[ModelKey, VersionFiles]:
        """List the versions that are there.  Blocks, for a bounded time.

        Raises:
            StorageFailure: the storage cannot be read.
        """
        with _asking("list models", self.location):
            files = self.storage.list_files(self.location)
        tree = models_below(files) if self.name is None else versions_of(self.name, files)
        for version in tree.values():
            # Thousands of hashes would hold up the loop; from here on they are known.
            _ = version.fingerprint
        return tree

    def has(self, key: ModelKey) -> bool:
        """Tell whether a model would be in here."""
        return self.name is None or self.name == key.name

    def __str__(self) -> str:
        return self.location


def open_sources(spec: ModelsSpec, open_storage: OpenStorage) -> list[ModelSource]:
    """Open the storages of all places that a project names, one for each kind of URL.

    Raises:
        ConfigError: a storage's library is not installed.
    """
    wanted: Mapping[str | None, str] = {entry.name: entry.path for entry in spec.entries} or {None: spec.dir}
    storages: dict[str, ModelStorage] = {}
    for location in wanted.values():
        if scheme_of(location) not in storages:
            storages[scheme_of(location)] = open_storage(location)
    return [ModelSource(name, location, storages[scheme_of(location)]) for name, location in wanted.items()]


def problem_of_saved_model(version: VersionFiles) -> str | None:
    """Tell why files cannot be a SavedModel, None if they can."""
    paths = version.paths
    if _GRAPH not in paths:
        return f"a SavedModel needs {_GRAPH}"
    if _INDEX not in paths and any(path.startswith(_VARIABLES) for path in paths):
        return f"the SavedModel has variables, but not {_INDEX}"
    return None
