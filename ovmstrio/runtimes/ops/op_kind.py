"""Pipelines of Ops beside other services as the server knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.config.op_entries import OP_PIPELINES, read_op_pipelines
from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import NotSupported
from ovmstrio.repository.fingerprints import paths_mark
from ovmstrio.repository.graph_files import python_files
from ovmstrio.repository.versions import ONLY_VERSION, Listing
from ovmstrio.runtimes.kind import Kind, Takes

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["OpPipelineKind"]


class OpPipelineKind(Kind[OpPipelineSpec]):
    """Services of Ops with a ``config.yml``."""

    name = OpPipelineSpec.kind
    spec = OpPipelineSpec
    takes = frozenset({Takes.HTTP, Takes.GRPC})
    imports = True
    section = OP_PIPELINES
    occupied = "Op pipeline has a name that is taken"

    def read(self, file: ConfigFile) -> list[OpPipelineSpec]:
        """Read the pipelines of Ops of the file."""
        return read_op_pipelines(file)

    def list_versions(self, spec: OpPipelineSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=_mark(spec))

    def files_mark(self, spec: OpPipelineSpec, directory: Path) -> str:
        """Look at the configuration, and at the code beside the script."""
        del directory
        return _mark(spec)

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Refuse: services of Ops run on their own."""
        del version, directory, context
        raise NotSupported(f"{spec.name!r} is a pipeline of Ops, which is served on its own: ovms serve {spec.config}")


def _mark(spec: OpPipelineSpec) -> str:
    return paths_mark([spec.config, spec.script, *python_files(spec.script.parent)])
