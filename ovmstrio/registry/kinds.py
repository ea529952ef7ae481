"""What sets the kinds of servables apart for the registry: versions, texts, and the order of loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovmstrio.config.specs import GraphSpec, HandlerSpec, ModelSpec, OpPipelineSpec, PipelineSpec
from ovmstrio.core.errors import GraphLoading, HandlerLoading, PipelineLoading, VersionLoading

if TYPE_CHECKING:
    from ovmstrio.config.specs import ServableSpec

__all__ = ["MODEL", "ONLY_VERSION", "Kind", "kind_of"]

ONLY_VERSION: Final = 1
"""The version of what has only one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of servable.

    ``has_versions`` is false where one version answers whatever version is asked for.  Kinds of a lower ``rank`` are
    loaded before those that may call them.  ``failed`` is the error code of a version whose load failed; ``retired``
    and ``loading`` say in OVMS's words why a call is refused, the latter with an error of the type ``refusal``.
    """

    name: str
    rank: int
    has_versions: bool
    failed: str
    retired: str
    loading: str
    refusal: type[VersionLoading]


MODEL: Final = Kind(
    ModelSpec.kind,
    rank=0,
    has_versions=True,
    failed="UNKNOWN",
    retired="Model with requested version is retired",
    loading="Model with requested version is not loaded yet",
    refusal=VersionLoading,
)
_PIPELINE: Final = Kind(
    PipelineSpec.kind,
    rank=1,
    has_versions=False,
    failed="FAILED_PRECONDITION",
    retired="Pipeline is retired",
    loading="Pipeline is not loaded yet",
    refusal=PipelineLoading,
)
_GRAPH: Final = Kind(
    GraphSpec.kind,
    rank=2,
    has_versions=False,
    failed="FAILED_PRECONDITION",
    retired="Mediapipe is retired",
    loading="Mediapipe is not loaded yet",
    refusal=GraphLoading,
)
_HANDLER: Final = Kind(
    HandlerSpec.kind,
    rank=3,
    has_versions=False,
    failed="FAILED_PRECONDITION",
    retired="Handler is retired",
    loading="Handler is not loaded yet",
    refusal=HandlerLoading,
)
_OP_PIPELINE: Final = Kind(
    OpPipelineSpec.kind,
    rank=4,
    has_versions=False,
    failed="FAILED_PRECONDITION",
    retired="Pipeline is retired",
    loading="Pipeline is not loaded yet",
    refusal=PipelineLoading,
)
_KINDS: Final = {kind.name: kind for kind in (MODEL, _PIPELINE, _GRAPH, _HANDLER, _OP_PIPELINE)}


def kind_of(spec: ServableSpec) -> Kind:
    """Tell the kind of what is configured."""
    return _KINDS[spec.kind]
