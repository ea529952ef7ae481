"""Sources of models, and copies of their versions on the local disk. Blocking; used in worker threads."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ovmstrio.core.errors import StorageFailure
from ovmstrio.core.tracing import NO_ATTRIBUTES, Attributes, StartRootSpan, client_span
from ovmstrio.handlers.config.project_spec import ModelsSpec
from ovmstrio.handlers.models.version_index import ModelKey, VersionFiles, versions_by_folder, versions_in_folder
from ovmstrio.stores.address import scheme_of
from ovmstrio.stores.open_storage import OpenStorage
from ovmstrio.stores.storage import ModelStorage, OnProgress, ignore_progress


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

    def make(self, key: ModelKey, version: VersionFiles, on_progress: OnProgress = ignore_progress) -> Copy:
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
