"""Pipelines of Ops as a kind of service: made by their scripts, each in a task of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ovmstrio.config.mounted_entries import OP_PIPELINES, read_op_pipelines
from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.inspection import NOTHING_INSIDE
from ovmstrio.repository.fingerprints import paths_mark
from ovmstrio.repository.graph_files import python_files
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Kind, Takes
from ovmstrio.runtimes.resident import host

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.inspection import Inside
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.kind import LoadContext
    from ovmstrio.runtimes.ops.op_service import OpService
    from ovmstrio.runtimes.ops.prepared_service import PreparedService

__all__ = ["OpPipelineKind"]


class OpPipelineKind(Kind[OpPipelineSpec]):
    """Pipelines of Ops.

    Args:
        prepared: services that a running script has handed over, by the names of their specs, which have no script.
    """

    name: ClassVar[str] = OpPipelineSpec.kind
    spec = OpPipelineSpec
    takes: ClassVar[frozenset[Takes]] = frozenset({Takes.TENSORS, Takes.HTTP})
    imports: ClassVar[bool] = True
    fills_cores: ClassVar[bool] = True
    section: ClassVar[str] = OP_PIPELINES
    occupied: ClassVar[str] = "Op pipeline has a name that is taken"

    def __init__(self, prepared: Mapping[str, PreparedService] | None = None) -> None:
        self._prepared = prepared or {}

    def read(self, file: ConfigFile) -> list[OpPipelineSpec]:
        """Read the pipelines of Ops of the file."""
        return read_op_pipelines(file)

    def list_versions(self, spec: OpPipelineSpec) -> Listing:
        """Give the one version."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=self.files_mark(spec, spec.base_path))

    def files_mark(self, spec: OpPipelineSpec, directory: Path) -> str:
        """Give a mark of the configuration, of the script and of all Python files beside it; blocking.

        What was handed over is made by code, so that no file of it is looked at.
        """
        if spec.script is None:
            return ""
        files = {spec.script, *python_files(spec.script.parent), *python_files(directory)}
        files |= {spec.config} if spec.config is not None else set(directory.glob("*.yml"))
        return paths_mark(files)

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> OpService:
        """Run the script as far as its service, and start the Ops; the caller owns the service and closes it.

        Raises:
            ConfigError: the script, the configuration or the Ops cannot be used, or an Op cannot be prepared.

        Cancellation: at any checkpoint, but a script that runs is first run; nothing is left.
        """
        # What only pipelines of Ops need is left alone by those who have none.
        from ovmstrio.runtimes.ops.load_service import open_loaded  # noqa: PLC0415 - for who loads only

        del version, directory
        if spec.errors:
            raise ConfigError(spec.errors)
        opened = open_loaded(spec, context, self._prepared)
        return await host(context.tasks, opened, kind=self.name, name=spec.name)

    def obstacle(self, service: Service) -> str:
        """Tell of workers that died."""
        from ovmstrio.runtimes.ops.op_service import OpService  # noqa: PLC0415 - as in `load`

        return service.obstacle() if isinstance(service, OpService) else ""

    def begin_drain(self, service: Service) -> None:
        """Answer what waits with 3001."""
        from ovmstrio.runtimes.ops.op_service import OpService  # noqa: PLC0415 - as in `load`

        if isinstance(service, OpService):
            service.begin_drain()

    def look_inside(self, spec: OpPipelineSpec, service: Service) -> Inside:
        """Tell of the Ops."""
        from ovmstrio.runtimes.ops.op_service import OpService  # noqa: PLC0415 - as in `load`

        del spec
        return service.inside if isinstance(service, OpService) else NOTHING_INSIDE
