"""Index of models and versions, built from the file paths in a storage.

::

    <model>/<number>/<files>     versions, if the first level contains nothing else
    <model>/<anything>           a model without versions, indexed as version "1"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from ovmstrio.serving.fingerprints import rows_fingerprint
from ovmstrio.stores.storage import StoredFile

LATEST: Final = "latest"
"""Placeholder for the highest version."""

ONLY_VERSION: Final = "1"
"""Version of a model without version folders."""


class ModelKey(NamedTuple):
    """Model name and version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


@dataclass(frozen=True)
class VersionFiles:
    """Files of one version, with paths relative to its folder."""

    files: tuple[StoredFile, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Hash that changes when a file is written, added, removed or renamed."""
        return rows_fingerprint((file.path, file.size, file.mark, file.modified) for file in self.files)

    @property
    def timestamp(self) -> int:
        """Modification time of the newest file, in whole seconds since 1970."""
        return int(max(file.modified for file in self.files))

    @property
    def paths(self) -> frozenset[str]:
        """Relative paths of the files."""
        return frozenset(file.path for file in self.files)


VersionIndex = Mapping[ModelKey, VersionFiles]
"""All versions of all models in a storage."""


class IndexChanges(NamedTuple):
    """Sorted differences between two trees: new or modified versions, and removed versions."""

    written: list[ModelKey]
    removed: list[ModelKey]


def diff_indexes(old: VersionIndex, new: VersionIndex) -> IndexChanges:
    """Compare two trees by the fingerprints of their versions."""
    written = [key for key in new if key not in old or old[key].fingerprint != new[key].fingerprint]
    return IndexChanges(sorted(written), sorted(old.keys() - new.keys()))


def is_version(text: str) -> bool:
    """Return whether a text is a version number."""
    return text.isascii() and text.isdecimal()


def versions_by_model(keys: Iterable[ModelKey]) -> dict[str, tuple[ModelKey, ...]]:
    """Group versions by model, highest first."""
    found: dict[str, list[ModelKey]] = {}
    for key in keys:
        found.setdefault(key.name, []).append(key)
    return {name: tuple(sorted(those, key=_rank, reverse=True)) for name, those in found.items()}


def _rank(key: ModelKey) -> tuple[int, str, str]:
    # Not int(): folder names may have more digits than int() accepts.
    digits = key.version.lstrip("0")
    return len(digits), digits, key.version


def versions_in_folder(name: str, files: Iterable[StoredFile]) -> dict[ModelKey, VersionFiles]:
    """Return the versions in a model's folder; empty if the folder is empty or missing."""
    return _index_versions(name, [(file.path, file) for file in files if file.path])


def versions_by_folder(files: Iterable[StoredFile]) -> dict[ModelKey, VersionFiles]:
    """Return the versions of all models in a folder; files outside model folders are ignored."""
    tree: dict[ModelKey, VersionFiles] = {}
    for name, placed in _by_folder((file.path, file) for file in files if "/" in file.path).items():
        tree |= _index_versions(name, placed)
    return tree


_RelativeFile = tuple[str, StoredFile]
"""Path relative to a folder, and the file."""


def _index_versions(name: str, found: list[_RelativeFile]) -> dict[ModelKey, VersionFiles]:
    if not found:
        return {}
    if not all(_is_in_version(path) for path, _ in found):
        return {ModelKey(name, ONLY_VERSION): _version(found)}
    return {ModelKey(name, version): _version(placed) for version, placed in _by_folder(found).items()}


def _version(placed: list[_RelativeFile]) -> VersionFiles:
    return VersionFiles(tuple(replace(file, path=path) for path, file in placed))


def _is_in_version(path: str) -> bool:
    folder, slash, rest = path.partition("/")
    return bool(slash and rest) and is_version(folder)


def _by_folder(placed: Iterable[_RelativeFile]) -> dict[str, list[_RelativeFile]]:
    folders: dict[str, list[_RelativeFile]] = {}
    for path, file in placed:
        folder, _, rest = path.partition("/")
        folders.setdefault(folder, []).append((rest, file))
    return folders
