"""What lies on disk of a servable, whatever its kind: its versions, and marks by which changes of them are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.config.specs import GraphSpec
from ovmstrio.errors import ConfigError
from ovmstrio.repository.fingerprints import tree_mark
from ovmstrio.repository.graph_files import graph_mark
from ovmstrio.repository.versions import Listing, scan

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec

__all__ = ["GRAPH_VERSION", "files_mark", "list_versions"]

GRAPH_VERSION: Final = 1
"""The one version that a graph has."""


def list_versions(spec: ServableSpec) -> Listing:
    """List the versions that could be loaded; a graph has its one version even where its file is missing.

    Raises:
        ConfigError: a model's settings cannot be used, or its versions cannot be listed.
    """
    if isinstance(spec, GraphSpec):
        return Listing({GRAPH_VERSION: spec.graph_path.parent}, mark=graph_mark(spec))
    if spec.errors:
        raise ConfigError(spec.errors)
    return scan(spec.base_path)


def files_mark(spec: ServableSpec, directory: Path) -> str:
    """Give a mark of all that a version is loaded from."""
    return graph_mark(spec) if isinstance(spec, GraphSpec) else tree_mark(directory)
