"""The kinds of services that there are; those of the first lines get the names that several want."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.runtimes.generation.text_model_kind import TextModelKind
from ovmstrio.runtimes.graphs.graph_kind import GraphKind
from ovmstrio.runtimes.handlers.handler_kind import HandlerKind
from ovmstrio.runtimes.kind import Kind
from ovmstrio.runtimes.models.model_kind import ModelKind
from ovmstrio.runtimes.ops.op_kind import OpPipelineKind
from ovmstrio.runtimes.pipelines.pipeline_kind import PipelineKind
from ovmstrio.runtimes.remote.remote_kind import RemoteKind

__all__ = ["KINDS", "Kinds", "table_of"]

Kinds = dict[str, Kind[Any]]
"""Kinds by their names, which are those of their specs."""


def table_of(*kinds: Kind[Any]) -> Kinds:
    """Make a table."""
    return {kind.name: kind for kind in kinds}


KINDS: Final = table_of(
    ModelKind(),
    PipelineKind(),
    GraphKind(),
    HandlerKind(),
    OpPipelineKind(),
    TextModelKind(),
    RemoteKind(),
)
"""The kinds that the server brings with it."""
