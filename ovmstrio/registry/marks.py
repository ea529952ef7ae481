"""What versions there are, with marks of all that each is made of: its files, and of a pipeline the models it calls.

::

    files on disk ───────────────┐
                                 ├─> mark: another one than that of the last load means to load again
    models, by version and load ─┘
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from ovmstrio.config.specs import PipelineSpec
from ovmstrio.registry.files import files_mark, list_versions
from ovmstrio.registry.kinds import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.registry.records import ModelRecord
    from ovmstrio.repository.versions import Listing

__all__ = ["Marks"]


class Marks:
    """Looks at files and at what is loaded.

    Args:
        models: everything that the registry knows, by name.
    """

    def __init__(self, models: Mapping[str, ModelRecord]) -> None:
        self.models = models

    async def list(self, spec: ServableSpec) -> Listing:
        """List the versions that could be loaded.

        Raises:
            ConfigError: a model's settings cannot be used, or its versions cannot be listed.

        Cancellation: once the files have been looked at; nothing is held.
        """
        listing = await trio.to_thread.run_sync(list_versions, spec)
        return replace(listing, mark=listing.mark + self._called(spec))

    async def of(self, spec: ServableSpec, directory: Path) -> str:
        """Give the mark that a version has if it is loaded now.

        Cancellation: once the files have been looked at; nothing is held.
        """
        called = self._called(spec)
        return await trio.to_thread.run_sync(files_mark, spec, directory) + called

    def _called(self, spec: ServableSpec) -> str:
        """Tell which loads of which versions a pipeline calls, as far as they come before it."""
        if not isinstance(spec, PipelineSpec):
            return ""
        called = sorted({(node.model_name, node.version) for node in spec.nodes if node.model_name})
        return "".join(f"\n{name}:{version}:{self._loaded(name, version, spec)}" for name, version in called)

    def _loaded(self, name: str, version: int, caller: ServableSpec) -> str:
        model = self.models.get(name)
        if model is None or model.kind.rank >= kind_of(caller).rank:
            return ""
        return model.loaded(version)
