"""What sets the kinds of servables apart for the registry: versions, and the order of loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovmstrio.config.specs import GraphSpec, HandlerSpec, ModelSpec, OpPipelineSpec, PipelineSpec

if TYPE_CHECKING:
    from ovmstrio.config.specs import ServableSpec

__all__ = ["MODEL", "ONLY_VERSION", "Kind", "kind_of"]

ONLY_VERSION: Final = 1
"""The version of what has only one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of servable.

    ``has_versions`` is false where one version answers whatever version is asked for.  Kinds of a lower ``rank`` are
    loaded before those that may call them.  ``failed`` is the error code of a version whose load failed.
    """

    name: str
    rank: int
    has_versions: bool
    failed: str


MODEL: Final = Kind(
    ModelSpec.kind,
    rank=0,
    has_versions=True,
    failed="UNKNOWN",
)
_PIPELINE: Final = Kind(
    PipelineSpec.kind,
    rank=1,
    has_versions=False,
    failed="FAILED_PRECONDITION",
)
_GRAPH: Final = Kind(
    GraphSpec.kind,
    rank=2,
    has_versions=False,
    failed="FAILED_PRECONDITION",
)
_HANDLER: Final = Kind(
    HandlerSpec.kind,
    rank=3,
    has_versions=False,
    failed="FAILED_PRECONDITION",
)
_OP_PIPELINE: Final = Kind(
    OpPipelineSpec.kind,
    rank=4,
    has_versions=False,
    failed="FAILED_PRECONDITION",
)
_KINDS: Final = {kind.name: kind for kind in (MODEL, _PIPELINE, _GRAPH, _HANDLER, _OP_PIPELINE)}


def kind_of(spec: ServableSpec) -> Kind:
    """Tell the kind of what is configured."""
    return _KINDS[spec.kind]
