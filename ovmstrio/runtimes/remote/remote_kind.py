"""Models of other servers as a kind of service."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ovmstrio.config.remote_entries import RemoteSpec, read_remotes
from ovmstrio.core.errors import ConfigError
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Kind, Takes
from ovmstrio.runtimes.resident import host

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["RemoteKind"]


class RemoteKind(Kind[RemoteSpec]):
    """Entries among the models that say where else the model is."""

    name: ClassVar[str] = RemoteSpec.kind
    spec = RemoteSpec
    takes: ClassVar[frozenset[Takes]] = frozenset({Takes.TENSORS})
    runs_user_code = False
    occupied: ClassVar[str] = "Remote model has a name that is taken"

    def read(self, file: ConfigFile) -> list[RemoteSpec]:
        """Read the entries of the file."""
        return read_remotes(file)

    def list_versions(self, spec: RemoteSpec) -> Listing:
        """Give the one version."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=self.files_mark(spec, spec.base_path))

    def files_mark(self, spec: RemoteSpec, directory: Path) -> str:
        """Give nothing: it has no files here."""
        del spec, directory
        return ""

    async def load(self, spec: RemoteSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Ask the other server for its model; the caller owns the service and closes it.

        Raises:
            ConfigError: the settings cannot be used.
            ServerError: the other server cannot be reached, or has no such model.

        Cancellation: at any checkpoint; nothing is left.
        """
        # What only these models need is left alone by those who have none.
        from ovmstrio.runtimes.remote.opening import open_remote  # noqa: PLC0415 - for who loads only

        del version, directory
        if spec.errors:
            raise ConfigError(spec.errors)
        return await host(context.tasks, open_remote(spec), kind=self.name, name=spec.name)

    def obstacle(self, service: Service) -> str:
        """Tell when no address of it can be called."""
        from ovmstrio.runtimes.remote.remote_servable import RemoteServable  # noqa: PLC0415 - as in `load`

        return service.obstacle if isinstance(service, RemoteServable) else ""
