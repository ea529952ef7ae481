"""Why a version that is not available cannot be called, in OVMS's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.errors import GraphLoading, HandlerLoading, PipelineLoading, VersionLoading

if TYPE_CHECKING:
    from ovmstrio.runtimes.kind import Kind

__all__ = ["Words", "words_of"]


class Words(NamedTuple):
    """What is said of a version that was retired, and of one that is not loaded, the latter with an error's type."""

    retired: str
    loading: str
    refusal: type[VersionLoading]


_VERSIONS: Final = Words(
    "Model with requested version is retired", "Model with requested version is not loaded yet", VersionLoading
)
_OTHERS: Final = {
    "graph": Words("Mediapipe is retired", "Mediapipe is not loaded yet", GraphLoading),
    "handler": Words("Handler is retired", "Handler is not loaded yet", HandlerLoading),
}
_PIPELINE: Final = Words("Pipeline is retired", "Pipeline is not loaded yet", PipelineLoading)


def words_of(kind: Kind[Any]) -> Words:
    """Give the words for a kind."""
    return _VERSIONS if kind.has_versions else _OTHERS.get(kind.name, _PIPELINE)
