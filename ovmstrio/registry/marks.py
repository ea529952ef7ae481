"""What versions there are, with marks of all that each is made of: its files, and the loads of what it calls.

::

    files on disk ───────────────┐
                                 ├─> mark: another one than that of the last load means to load again
    models, by version and load ─┘
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from ovmstrio.registry.records import DEFAULT_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.registry.records import ServiceRecord
    from ovmstrio.repository.versions import Listing
    from ovmstrio.runtimes.kind import Dependency

__all__ = ["Marks"]


class Marks:
    """Looks at files and at what is loaded.

    Args:
        services: everything that the registry knows, by name.
    """

    def __init__(self, services: Mapping[str, ServiceRecord]) -> None:
        self.services = services

    async def list(self, record: ServiceRecord, spec: ServableSpec) -> Listing:
        """List the versions that could be loaded.

        Raises:
            ConfigError: the settings cannot be used, or the versions cannot be listed.

        Cancellation: once the files have been looked at; nothing is held.
        """
        listing = await trio.to_thread.run_sync(record.kind.list_versions, spec)
        return replace(listing, mark=listing.mark + self._called(record))

    async def of(self, record: ServiceRecord, spec: ServableSpec, directory: Path) -> str:
        """Give the mark that a version has if it is loaded now.

        Cancellation: once the files have been looked at; nothing is held.
        """
        called = self._called(record)
        return await trio.to_thread.run_sync(record.kind.files_mark, spec, directory) + called

    def _called(self, record: ServiceRecord) -> str:
        """Tell which loads of which versions answer the calls of what is loaded again with them."""
        return "".join(f"\n{call.name}:{call.version}:{self._loaded(call)}" for call in record.calls if call.reloads)

    def _loaded(self, call: Dependency) -> str:
        service = self.services.get(call.name)
        return "" if service is None else service.loaded(int(call.version or DEFAULT_VERSION))
