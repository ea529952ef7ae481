"""Op pipelines as a kind of service, each created by a script and hosted in a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ovmstrio.config.schema import OPTIONAL
from ovmstrio.config.service_options import ServiceEntry, check_name, check_path
from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.service import NO_INTROSPECTION
from ovmstrio.serving.fingerprints import paths_fingerprint, python_files
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.serving.kind import CallType, Kind
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile, Entry
    from ovmstrio.core.service import Introspection, Service
    from ovmstrio.ops.op_service import OpService
    from ovmstrio.ops.prepared_service import PreparedService
    from ovmstrio.serving.kind import LoadContext


class OpPipelineEntry(ServiceEntry):
    """Keys of an entry of ``op_pipeline_config_list``."""

    name: str
    path: str
    service: str = OPTIONAL


def _read_op_pipeline(entry: Entry, directory: Path) -> OpPipelineSpec:
    given = entry.values
    location = directory / given["path"]
    config = location if location.suffix in {".yml", ".yaml"} else location / "config.yml"
    problems = [
        *check_name(given["name"], is_mounted=True),
        *check_path("path", given["path"], "the config.yml of the Ops, or its folder"),
        *check_path("service", given.get("service", "."), "the Python script of the service"),
    ]
    script = directory / given["service"] if "service" in given else config.parent / "web_service.py"
    return entry.build(OpPipelineSpec, problems, base_path=config.parent, config=config, script=script)


class OpPipelineKind(Kind[OpPipelineSpec]):
    """Kind of Op pipelines; ``prepared`` holds services of a running script, by names of specs without script."""

    name: ClassVar[str] = OpPipelineSpec.kind
    spec = OpPipelineSpec
    call_types: ClassVar[frozenset[CallType]] = frozenset({CallType.TENSORS, CallType.HTTP})
    imports: ClassVar[bool] = True
    fills_cores: ClassVar[bool] = True
    section: ClassVar[str] = "op_pipeline_config_list"
    occupied: ClassVar[str] = "Op pipeline has a name that is taken"

    def __init__(self, prepared: Mapping[str, PreparedService] | None = None) -> None:
        self._prepared = prepared or {}

    def read(self, file: ConfigFile) -> list[OpPipelineSpec]:
        """Read the Op pipelines of the configuration file."""
        entries = file.entries(self.name, file.items(self.section), OpPipelineEntry)
        return [_read_op_pipeline(entry, file.directory) for entry in entries]

    def list_versions(self, spec: OpPipelineSpec) -> Listing:
        """Return the only version."""
        return Listing({ONLY_VERSION: spec.base_path}, fingerprint=self.fingerprint(spec, spec.base_path))

    def fingerprint(self, spec: OpPipelineSpec, directory: Path) -> str:
        """Return a fingerprint of configuration, script and its folder; empty for a prepared service; blocking."""
        if spec.script is None:
            return ""
        files = {spec.script, *python_files(spec.script.parent), *python_files(directory)}
        files |= {spec.config} if spec.config is not None else set(directory.glob("*.yml"))
        return paths_fingerprint(files)

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> OpService:
        """Run the script up to its service and start the Ops; the caller must close the service.

        Raises ConfigError if the script, the configuration or an Op is unusable.  A running script ignores
        cancellation.
        """
        from ovmstrio.ops.loading import open_loaded  # noqa: PLC0415 - imported when first needed

        del version, directory
        if spec.errors:
            raise ConfigError(spec.errors)
        opened = open_loaded(spec, context, self._prepared)
        return await host_service(context.tasks, opened, kind=self.name, name=spec.name)

    def unready_reason(self, service: Service) -> str:
        """Return which Ops have no running worker; empty if none."""
        from ovmstrio.ops.op_service import OpService  # noqa: PLC0415 - imported when first needed

        return service.unready_reason() if isinstance(service, OpService) else ""

    def begin_drain(self, service: Service) -> None:
        """Reject waiting requests with 3001."""
        from ovmstrio.ops.op_service import OpService  # noqa: PLC0415 - imported when first needed

        if isinstance(service, OpService):
            service.begin_drain()

    def look_inside(self, spec: OpPipelineSpec, service: Service) -> Introspection:
        """Return the state of the Ops."""
        from ovmstrio.ops.op_service import OpService  # noqa: PLC0415 - imported when first needed

        del spec
        return service.inside if isinstance(service, OpService) else NO_INTROSPECTION
