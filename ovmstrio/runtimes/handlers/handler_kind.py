"""Handler projects beside other services as the server knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.config.mounted_entries import HANDLERS, read_handlers
from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.repository.handler_files import handler_mark
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Kind, Takes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["HandlerKind"]


class HandlerKind(Kind[HandlerSpec]):
    """Projects with a ``nucleus.yaml``."""

    name = HandlerSpec.kind
    spec = HandlerSpec
    takes = frozenset({Takes.HTTP, Takes.GRPC})
    imports = True
    fills_cores = True
    section = HANDLERS
    occupied = "Handler has a name that is taken"

    def read(self, file: ConfigFile) -> list[HandlerSpec]:
        """Read the handlers of the file."""
        return read_handlers(file)

    def list_versions(self, spec: HandlerSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=handler_mark(spec))

    def files_mark(self, spec: HandlerSpec, directory: Path) -> str:
        """Look at the project's code and settings."""
        del directory
        return handler_mark(spec)

    def examine(self, spec: HandlerSpec) -> Sequence[Problem]:
        """Tell everything about the project's file; it is told again when it keeps the handler from being loaded."""
        from ovmstrio.runtimes.handlers.mounting import examine_mounted  # noqa: PLC0415 - as in `load`

        try:
            return examine_mounted(spec)[1]
        except ConfigError as error:
            return error.problems

    def obstacle(self, service: Service) -> str:
        """Tell that its processes have ended, where it has some and none is left."""
        from ovmstrio.runtimes.handlers.mounting import HandlerServable  # noqa: PLC0415 - as in `load`

        return service.obstacle if isinstance(service, HandlerServable) else ""

    async def load(self, spec: HandlerSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Import the project's code and make its handler; a trial does it in a process of its own."""
        # What only handlers need is left alone by those who have none.
        from ovmstrio.runtimes.handlers.mounting import load_handler, read_mounted  # noqa: PLC0415 - loaded on demand

        del version, directory
        if context.is_trial:
            from ovmstrio.runtimes.handlers.trial import try_mounted  # noqa: PLC0415 - checks alone need it

            project = await trio.to_thread.run_sync(read_mounted, spec, abandon_on_cancel=True)
            return await try_mounted(project, spec.name)
        return await load_handler(spec, context)
