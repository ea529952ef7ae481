"""Service kinds; on name conflicts, earlier kinds have precedence."""

from __future__ import annotations

from typing import Any, Final

from ovmstrio.graphs.kind import GraphKind
from ovmstrio.handlers.kind import HandlerKind
from ovmstrio.models.kind import ModelKind
from ovmstrio.ops.kind import OpPipelineKind
from ovmstrio.pipelines.kind import PipelineKind
from ovmstrio.remote.kind import RemoteKind
from ovmstrio.serving.kind import Kind
from ovmstrio.text.kind import TextModelKind

Kinds = dict[str, Kind[Any]]
"""Kinds by name."""


def table_of(*kinds: Kind[Any]) -> Kinds:
    """Return kinds by name."""
    return {kind.name: kind for kind in kinds}


KINDS: Final = table_of(
    ModelKind(), PipelineKind(), GraphKind(), HandlerKind(), OpPipelineKind(), TextModelKind(), RemoteKind()
)
"""Built-in kinds."""
