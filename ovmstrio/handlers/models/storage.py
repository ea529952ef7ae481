"""Storages of models: local folders, and object stores through fsspec. Blocking; used in worker threads."""

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
from ovmstrio.core.tracing import NO_ATTRIBUTES, Attributes, StartRootSpan, client_span
from ovmstrio.handlers.config.project_spec import ModelsSpec
from ovmstrio.handlers.models.version_index import (
    STALL_SECONDS,
    ModelKey,
    OnProgress,
    StoredFile,
    VersionFiles,
    versions_by_folder,
    versions_in_folder,
)
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.regular_files import open_regular

_PACKAGES: Final = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}
_PIECE_BYTES: Final = 8 * 2**20


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

        Raises:
            StorageFailure: the file cannot be read or no longer exists.
        """
        ...

    def close(self) -> None:
        """Close connections; called once, with no other call running."""
        ...


OpenStorage = Callable[[str], ModelStorage]
"""Opens the storage of a location."""


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
                while piece := source.read(_PIECE_BYTES):
                    copy.write(piece)
                    on_progress()
        except OSError as error:
            raise StorageFailure(f"{file.location} cannot be copied: {error}") from error

    def close(self) -> None:
        """Do nothing."""


def open_storage(location: str, stall_seconds: float = STALL_SECONDS) -> ModelStorage:
    """Open the storage of a location; reads fail after ``stall_seconds`` without data.

    Raises:
        ConfigError: the package for such URLs is not installed.
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
        message = f"URLs that begin with {scheme}:// cannot be read: {error}"
        raise ConfigError([Problem(message, found=location, suggestion=extra)]) from error
    return storage


def scheme_of(location: str) -> str:
    """Return the lower-case scheme of a URL; empty for a path."""
    scheme, mark, _ = location.partition("://")
    return scheme.lower() if mark else ""


def local_path(location: str) -> Path:
    """Return the path of a local folder, given as a path or a ``file://`` URL."""
    return Path(unquote(urlsplit(location).path)) if scheme_of(location) == "file" else Path(location)


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


# Copies and sources


@dataclass(slots=True, eq=False)
class Copy:
    """Files of a version on the local disk; compared by identity.

    Attributes:
        fingerprint: of the files when they were listed.
        uses: number of calls and loads that need the files.
    """

    key: ModelKey
    fingerprint: str
    folder: Path
    uses: int = 0


def _storage_span(name: str, source: ModelSource, about: Attributes = NO_ATTRIBUTES) -> AbstractContextManager[object]:
    location = source.location
    if scheme_of(location) in {"", "file"}:
        return nullcontext()
    # User info and query of a URL may be secret.
    url = urlsplit(location)
    place = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return client_span(name, {"url.full": place, "url.scheme": url.scheme, **about}, source.start_root_span)


class CopyMaker:
    """Creates and removes copies below a folder; blocking and thread-safe."""

    def __init__(self, root: Path, sources: Sequence[ModelSource]) -> None:
        self._root = root
        self._sources = sources
        self._numbers = itertools.count(1)

    def make(self, key: ModelKey, version: VersionFiles, on_progress: OnProgress = lambda: None) -> Copy:
        """Download all files of a version.

        Raises:
            StorageFailure: a file cannot be read or written; the partial copy is removed.
        """
        source = next(source for source in self._sources if source.has(key))
        number = str(next(self._numbers))
        unfinished, place = self._root / f"{number}.part", self._root / number
        try:
            targets = {unfinished / key.name / key.version / file.path: file for file in version.files}
            for folder in {target.parent for target in targets}:
                folder.mkdir(parents=True, exist_ok=True)
            about = {"ovmstrio.model.name": key.name, "ovmstrio.model.version": key.version}
            with _storage_span("fetch model", source, about):
                for target, file in targets.items():
                    source.storage.fetch(file, target, on_progress)
            unfinished.rename(place)
        except OSError as error:
            raise StorageFailure(f"{key} cannot be stored in {self._root}: {error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return Copy(key, version.fingerprint, place / key.name / key.version)

    def remove(self, copy: Copy) -> None:
        """Remove the files of a copy."""
        shutil.rmtree(copy.folder.parent.parent, ignore_errors=True)


_GRAPH: Final = "saved_model.pb"
_VARIABLES: Final = "variables/"
_INDEX: Final = "variables/variables.index"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of one model, or of a folder of models if ``name`` is None."""

    name: str | None
    location: str
    storage: ModelStorage
    start_root_span: StartRootSpan | None = None

    def read(self) -> dict[ModelKey, VersionFiles]:
        """List the versions in the location; raise StorageFailure if the storage cannot be read."""
        with _storage_span("list models", self):
            files = self.storage.list_files(self.location)
        tree = versions_by_folder(files) if self.name is None else versions_in_folder(self.name, files)
        for version in tree.values():
            # Computed and cached here: thousands of hashes would block the event loop.
            _ = version.fingerprint
        return tree

    def has(self, key: ModelKey) -> bool:
        """Return whether the location can contain a version."""
        return self.name is None or self.name == key.name

    def __str__(self) -> str:
        return self.location


def open_sources(
    spec: ModelsSpec, open_storage: OpenStorage, start_root_span: StartRootSpan | None = None
) -> list[ModelSource]:
    """Open the locations of a project, with one storage for each URL scheme.

    Raises:
        ConfigError: the package of a storage is not installed.
    """
    wanted: Mapping[str | None, str] = {entry.name: entry.path for entry in spec.entries} or {None: spec.dir}
    storages: dict[str, ModelStorage] = {}
    for location in wanted.values():
        if scheme_of(location) not in storages:
            storages[scheme_of(location)] = open_storage(location)
    return [
        ModelSource(name, location, storages[scheme_of(location)], start_root_span) for name, location in wanted.items()
    ]


def saved_model_problem(version: VersionFiles) -> str | None:
    """Return the reason why files are not a SavedModel; None if they are."""
    paths = version.paths
    if _GRAPH not in paths:
        return f"a SavedModel needs {_GRAPH}"
    if _INDEX not in paths and any(path.startswith(_VARIABLES) for path in paths):
        return f"the SavedModel has variables, but not {_INDEX}"
    return None
