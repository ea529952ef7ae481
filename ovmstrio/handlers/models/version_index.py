"""Which versions of which models a storage has, told from the paths of its files alone.

::

    <model>/<number>/<files>     versions, if there is nothing else on the first level
    <model>/<anything>           one model without versions, which counts as version "1"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from ovmstrio.serving.fingerprints import rows_mark

__all__ = [
    "LATEST",
    "ONLY_VERSION",
    "ModelKey",
    "StoredFile",
    "Tree",
    "TreeChanges",
    "VersionFiles",
    "diff",
    "is_version",
    "models_below",
    "versions_by_model",
    "versions_of",
]

LATEST: Final = "latest"
"""What stands for the highest version."""

ONLY_VERSION: Final = "1"
"""The version of a model that has no versions."""


class ModelKey(NamedTuple):
    """One version of one model."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a storage.

    Attributes:
        path: where it is, relative to what was listed, with slashes; empty if it is that itself.
        location: by what the storage finds it again.
        size: in bytes.
        mark: changes when the file's content does.
        modified: when it was written, in seconds since 1970.
    """

    path: str
    location: str
    size: int
    mark: str
    modified: float


@dataclass(frozen=True)
class VersionFiles:
    """The files of one version, their paths relative to its folder."""

    files: tuple[StoredFile, ...]

    @cached_property
    def fingerprint(self) -> str:
        """What changes when a file is written, appears, goes or is renamed, however short the time in between."""
        return rows_mark((file.path, file.size, file.mark, file.modified) for file in self.files)

    @property
    def timestamp(self) -> int:
        """When the newest file was written, in whole seconds since 1970."""
        return int(max(file.modified for file in self.files))

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the files."""
        return frozenset(file.path for file in self.files)


Tree = Mapping[ModelKey, VersionFiles]
"""All versions of all models that are there."""


class TreeChanges(NamedTuple):
    """How one tree became another: what has come or been written anew, and what has gone, both sorted."""

    written: list[ModelKey]
    removed: list[ModelKey]


def diff(old: Tree, new: Tree) -> TreeChanges:
    """Compare two trees by the fingerprints of their versions."""
    written = [key for key in new if key not in old or old[key].fingerprint != new[key].fingerprint]
    return TreeChanges(sorted(written), sorted(old.keys() - new.keys()))


def is_version(text: str) -> bool:
    """Tell whether a text is a version's number."""
    return text.isascii() and text.isdecimal()


def versions_by_model(keys: Iterable[ModelKey]) -> dict[str, tuple[ModelKey, ...]]:
    """Sort versions by their models, the highest first."""
    found: dict[str, list[ModelKey]] = {}
    for key in keys:
        found.setdefault(key.name, []).append(key)
    return {name: tuple(sorted(those, key=_rank, reverse=True)) for name, those in found.items()}


def _rank(key: ModelKey) -> tuple[int, str, str]:
    # Names of folders may have more digits than Python is willing to convert.
    digits = key.version.lstrip("0")
    return len(digits), digits, key.version


def versions_of(name: str, files: Iterable[StoredFile]) -> dict[ModelKey, VersionFiles]:
    """Divide the files of a model's folder into its versions; none if there is no folder, or nothing in it."""
    return _divide(name, [(file.path, file) for file in files if file.path])


def models_below(files: Iterable[StoredFile]) -> dict[ModelKey, VersionFiles]:
    """Divide the files of a folder of models into the versions of these; files that are in no model do not count."""
    tree: dict[ModelKey, VersionFiles] = {}
    for name, placed in _by_folder((file.path, file) for file in files if "/" in file.path).items():
        tree |= _divide(name, placed)
    return tree


_Placed = tuple[str, StoredFile]
"""A path relative to a folder, and the file that is there."""


def _divide(name: str, found: list[_Placed]) -> dict[ModelKey, VersionFiles]:
    if not found:
        return {}
    if not all(_is_in_version(path) for path, _ in found):
        return {ModelKey(name, ONLY_VERSION): _version(found)}
    return {ModelKey(name, version): _version(placed) for version, placed in _by_folder(found).items()}


def _version(placed: list[_Placed]) -> VersionFiles:
    return VersionFiles(
        tuple(StoredFile(path, file.location, file.size, file.mark, file.modified) for path, file in placed)
    )


def _is_in_version(path: str) -> bool:
    folder, slash, rest = path.partition("/")
    return bool(slash and rest) and is_version(folder)


def _by_folder(placed: Iterable[_Placed]) -> dict[str, list[_Placed]]:
    folders: dict[str, list[_Placed]] = {}
    for path, file in placed:
        folder, _, rest = path.partition("/")
        folders.setdefault(folder, []).append((rest, file))
    return folders
