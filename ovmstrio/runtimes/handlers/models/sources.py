"""The places that a project takes its models from, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ovmstrio.runtimes.handlers.config.project_spec import ModelsSpec
from ovmstrio.runtimes.handlers.models.storage import ModelStorage, OpenStorage, scheme_of
from ovmstrio.runtimes.handlers.models.tree import ModelKey, VersionFiles, models_below, versions_of

__all__ = ["ModelSource", "open_sources", "problem_of_saved_model"]

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
