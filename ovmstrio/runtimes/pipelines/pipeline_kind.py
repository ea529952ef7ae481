"""Pipelines of models and custom nodes as the server knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.config.pipeline_entries import NODE_LIBRARIES, PIPELINES, read_pipelines
from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.inspection import NOTHING_INSIDE
from ovmstrio.repository.pipeline_files import pipeline_mark
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Dependency, Kind, Takes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.errors import Problem
    from ovmstrio.core.inspection import Inside
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["PipelineKind"]


class PipelineKind(Kind[PipelineSpec]):
    """DAGs, which look at what they call when they are loaded."""

    name = PipelineSpec.kind
    spec = PipelineSpec
    takes = frozenset({Takes.TENSORS})
    section = PIPELINES
    further_sections = (NODE_LIBRARIES,)
    tells_all = True
    occupied = "Pipeline has the same name as model"

    def read(self, file: ConfigFile) -> list[PipelineSpec]:
        """Read the pipelines of the file."""
        return read_pipelines(file)

    def depends_on(self, spec: PipelineSpec) -> Sequence[Dependency]:
        """Give what the nodes call."""
        called = sorted({(node.model_name, node.version) for node in spec.nodes if node.model_name})
        return [
            Dependency(name, str(version) if version else "", reloads=True)
            for name, version in called
            if name != spec.name
        ]

    def list_versions(self, spec: PipelineSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=pipeline_mark(spec))

    def files_mark(self, spec: PipelineSpec, directory: Path) -> str:
        """Look at the libraries of custom nodes."""
        del directory
        return pipeline_mark(spec)

    def examine(self, spec: PipelineSpec) -> Sequence[Problem]:
        """Tell everything about how the nodes are joined; errors are told again when they keep it from being loaded."""
        from ovmstrio.runtimes.pipelines.structure import examine_structure  # noqa: PLC0415 - as in `load`

        return examine_structure(spec)[1]

    async def load(self, spec: PipelineSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Open the custom nodes, and see that everything fits together."""
        # What only pipelines need is left alone by those who have none.
        from ovmstrio.runtimes.pipelines.load_pipeline import load_pipeline  # noqa: PLC0415 - for who loads only

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

    def look_inside(self, spec: PipelineSpec, service: Service) -> Inside:
        """Tell of the pipeline's nodes and connections."""
        from ovmstrio.runtimes.pipelines.pipeline_servable import DagServable  # noqa: PLC0415 - as in `load`

        del spec
        return service.inside if isinstance(service, DagServable) else NOTHING_INSIDE
