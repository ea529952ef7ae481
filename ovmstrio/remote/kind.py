"""Remote models as a kind of service."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ovmstrio.config.remote_entries import RemoteSpec, read_remotes
from ovmstrio.core.errors import ConfigError
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.serving.kind import CallType, Kind
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.service import Service
    from ovmstrio.serving.kind import LoadContext


class RemoteKind(Kind[RemoteSpec]):
    """Kind of models on other servers."""

    name: ClassVar[str] = RemoteSpec.kind
    spec = RemoteSpec
    call_types: ClassVar[frozenset[CallType]] = frozenset({CallType.TENSORS})
    runs_user_code = False
    occupied: ClassVar[str] = "Remote model has a name that is taken"

    def read(self, file: ConfigFile) -> list[RemoteSpec]:
        """Read the remote models of the configuration file."""
        return read_remotes(file)

    def list_versions(self, spec: RemoteSpec) -> Listing:
        """Return the only version."""
        return Listing({ONLY_VERSION: spec.base_path}, fingerprint=self.fingerprint(spec, spec.base_path))

    def fingerprint(self, spec: RemoteSpec, directory: Path) -> str:
        """Return an empty fingerprint: remote models have no local files."""
        del spec, directory
        return ""

    async def load(self, spec: RemoteSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Load the remote model's metadata; the caller must close the service; raises ConfigError or ServerError."""
        from ovmstrio.remote.servable import open_remote  # noqa: PLC0415 - imported when first needed

        del version, directory
        if spec.errors:
            raise ConfigError(spec.errors)
        opening = open_remote(spec, partial(context.meters.unreachable, spec.name))
        return await host_service(context.tasks, opening, kind=self.name, name=spec.name)

    def unready_reason(self, service: Service) -> str:
        """Return why no address can be called; empty if one can."""
        from ovmstrio.remote.servable import RemoteServable  # noqa: PLC0415 - imported when first needed

        return service.unready_reason if isinstance(service, RemoteServable) else ""


# Opening
