"""What lies on disk of a servable, whatever its kind: its versions, and marks by which changes of them are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.config.specs import GraphSpec, HandlerSpec, OpPipelineSpec, PipelineSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.registry.kinds import ONLY_VERSION
from ovmstrio.repository.fingerprints import tree_mark
from ovmstrio.repository.graph_files import graph_mark
from ovmstrio.repository.handler_files import handler_mark
from ovmstrio.repository.pipeline_files import pipeline_mark
from ovmstrio.repository.versions import Listing, scan

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec

__all__ = ["files_mark", "list_versions"]

_NO_FILES: Final = ""
"""The mark of what is made by code: no file of it is looked at."""


def list_versions(spec: ServableSpec) -> Listing:
    """List the versions that could be loaded; what has only one has it even where its files are missing.

    Raises:
        ConfigError: a model's settings cannot be used, or its versions cannot be listed.
    """
    if isinstance(spec, GraphSpec):
        return Listing({ONLY_VERSION: spec.graph_path.parent}, mark=graph_mark(spec))
    if isinstance(spec, PipelineSpec):
        return Listing({ONLY_VERSION: spec.base_path}, mark=pipeline_mark(spec))
    if isinstance(spec, HandlerSpec):
        return Listing({ONLY_VERSION: spec.base_path}, mark=handler_mark(spec))
    if isinstance(spec, OpPipelineSpec):
        return Listing({ONLY_VERSION: spec.base_path}, mark=_NO_FILES)
    if spec.errors:
        raise ConfigError(spec.errors)
    return scan(spec.base_path)


def files_mark(spec: ServableSpec, directory: Path) -> str:
    """Give a mark of all that a version is loaded from."""
    if isinstance(spec, GraphSpec):
        return graph_mark(spec)
    if isinstance(spec, HandlerSpec):
        return handler_mark(spec)
    if isinstance(spec, OpPipelineSpec):
        return _NO_FILES
    return pipeline_mark(spec) if isinstance(spec, PipelineSpec) else tree_mark(directory)
