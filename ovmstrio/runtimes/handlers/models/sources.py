"""The places that a project takes its models from, and what is in them."""

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
from ovmstrio.core.tracing import NO_ATTRIBUTES, Attributes, part_of_server
from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec
from ovmstrio.runtimes.handlers.models.storage import ModelStorage, Moved, OpenStorage, scheme_of
from ovmstrio.runtimes.handlers.models.tree import ModelKey, VersionFiles, models_below, versions_of

__all__ = ["Copy", "CopyMaker", "ModelSource", "open_sources", "problem_of_saved_model"]


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
