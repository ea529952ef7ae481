"""Handler projects beside other services as the server knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.config.handler_entries import HANDLERS, read_handlers
from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ServerError
from ovmstrio.repository.handler_files import handler_mark
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Kind, Takes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.handlers.grpc.project import GrpcProject
    from ovmstrio.runtimes.handlers.handler_servable import HandlerServable
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["GrpcHandlers", "HandlerKind"]


class GrpcHandlers:
    """The handlers with services of their own, which are loaded before the server listens, for it has to know those."""

    def __init__(self) -> None:
        self._opened: dict[str, HandlerServable | ServerError] = {}

    async def open(self, specs: Iterable[HandlerSpec], context: LoadContext) -> list[GrpcProject]:
        """Load those that have services, and give these; a handler that cannot be loaded says so when it is taken.

        Cancellation: while handlers are loaded.
        """
        projects = []
        for spec in specs:
            # As in `HandlerKind.load`.
            from ovmstrio.runtimes.handlers.mounting import is_grpc, load_handler  # noqa: PLC0415

            if not await is_grpc(spec):
                continue
            try:
                servable = await load_handler(spec, tasks=context.tasks)
            except ServerError as error:
                self._opened[spec.name] = error
            else:
                self._opened[spec.name] = servable
                projects += [servable.grpc] if servable.grpc is not None else []
        return projects

    def take(self, name: str) -> HandlerServable | None:
        """Hand over a handler that was loaded, once.

        Raises:
            ServerError: why it could not be.
        """
        opened = self._opened.pop(name, None)
        if isinstance(opened, ServerError):
            raise opened
        return opened


class HandlerKind(Kind[HandlerSpec]):
    """Projects with a ``nucleus.yaml``."""

    name = HandlerSpec.kind
    spec = HandlerSpec
    takes = frozenset({Takes.HTTP, Takes.GRPC})
    imports = True
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

    async def load(self, spec: HandlerSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Import the project's code and make its handler; a trial does it in a process of its own."""
        # What only handlers need is left alone by those who have none.
        from ovmstrio.runtimes.handlers.mounting import load_handler, read_mounted  # noqa: PLC0415

        del version, directory
        if context.is_trial:
            from ovmstrio.runtimes.handlers.trial import TriedHandler, try_handler  # noqa: PLC0415

            project = await trio.to_thread.run_sync(read_mounted, spec, abandon_on_cancel=True)
            problems = await try_handler(project, mounted_as=spec.name)
            if problems:
                raise ConfigError(problems)
            return TriedHandler(spec.name)
        opened = context.shared(GrpcHandlers).take(spec.name)
        if opened is not None:
            return opened
        servable = await load_handler(spec, tasks=context.tasks, batch_hooks=context.meters.batches(spec.name, "1"))
        if servable.grpc is not None:
            await servable.aclose()
            text = f"the gRPC service of {spec.name!r} can only be loaded when the server starts; restart it"
            raise FailedPrecondition(text)
        return servable
