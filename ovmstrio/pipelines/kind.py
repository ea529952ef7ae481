"""The pipeline kind: loading, validation, introspection and fingerprints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.config.pipeline_entries import NODE_LIBRARIES, PIPELINES, read_pipelines
from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.errors import Problem
from ovmstrio.core.service import NO_INTROSPECTION, Introspection
from ovmstrio.serving.fingerprints import paths_fingerprint, python_files
from ovmstrio.serving.kind import CallType, Dependency, Kind
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.service import Service
    from ovmstrio.serving.kind import LoadContext

# Fingerprints

_PYTHON: Final = ".py"


def _pipeline_fingerprint(spec: PipelineSpec) -> str:
    """Return the fingerprint of the custom-node libraries; changes when a file is written, added or removed.

    For a Python library, the other Python files of its folder count too. Built-in libraries have no files. Unreadable
    files count as a state.
    """
    return paths_fingerprint(file for library in spec.libraries.values() for file in _files(library))


def _files(library: Path) -> set[Path]:
    if not library.is_absolute():
        return set()
    return {library, *python_files(library.parent)} if library.suffix == _PYTHON else {library}


# Kind


class PipelineKind(Kind[PipelineSpec]):
    """DAG pipelines; the models they call must be loaded first."""

    name = PipelineSpec.kind
    spec = PipelineSpec
    call_types = frozenset({CallType.TENSORS})
    section = PIPELINES
    further_sections = (NODE_LIBRARIES,)
    reports_all_problems = True
    occupied = "Pipeline has the same name as model"

    def read(self, file: ConfigFile) -> list[PipelineSpec]:
        """Parse the pipelines of a configuration file."""
        return read_pipelines(file)

    def depends_on(self, spec: PipelineSpec) -> Sequence[Dependency]:
        """Return the servables that the nodes call."""
        called = sorted({(node.model_name, node.version) for node in spec.nodes if node.model_name})
        return [
            Dependency(name, str(version) if version else "", reloads=True)
            for name, version in called
            if name != spec.name
        ]

    def list_versions(self, spec: PipelineSpec) -> Listing:
        """Return the only version."""
        return Listing({ONLY_VERSION: spec.base_path}, fingerprint=_pipeline_fingerprint(spec))

    def fingerprint(self, spec: PipelineSpec, directory: Path) -> str:
        """Return the fingerprint of the custom-node libraries."""
        del directory
        return _pipeline_fingerprint(spec)

    def examine(self, spec: PipelineSpec) -> Sequence[Problem]:
        """Return all problems of the pipeline's structure."""
        from ovmstrio.pipelines.structure import validate_structure  # noqa: PLC0415 - imported when first needed

        return validate_structure(spec)[1]

    async def load(self, spec: PipelineSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Load the pipeline."""
        from ovmstrio.pipelines.loading import load_pipeline  # noqa: PLC0415 - imported when first needed

        del version, directory
        return await load_pipeline(
            spec,
            lease=context.lease,
            tasks=context.tasks,
            meters=context.meters,
            configured=context.names,
            hide_errors=context.hide_errors,
            is_isolated=context.isolates_nodes,
        )

    def look_inside(self, spec: PipelineSpec, service: Service) -> Introspection:
        """Return the pipeline's nodes and connections."""
        from ovmstrio.pipelines.servable import PipelineServable  # noqa: PLC0415 - imported when first needed

        del spec
        return service.inside if isinstance(service, PipelineServable) else NO_INTROSPECTION
