"""What the repository extension of KServe v2 lists, the same on gRPC and on REST."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from ovmstrio.registry import VersionState

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["IndexEntry", "extensions_of", "repository_index", "server_version"]

_EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "generate",
    "logging",
    "model_configuration",
    "statistics",
)


def extensions_of(plane: DataPlane) -> list[str]:
    """Tell which extensions of KServe v2 the server has, as it was started."""
    allowed = {
        "model_repository": plane.control is not None,
        "model_repository(unload_dependents)": plane.control is not None,
        "system_shared_memory": plane.regions.is_allowed,
    }
    return sorted([*_EXTENSIONS, *(name for name, is_allowed in allowed.items() if is_allowed)])


def server_version() -> str:
    """Give the version of this server."""
    return version("ovmstrio")


_STATES: Final = {
    VersionState.START: "LOADING",
    VersionState.LOADING: "LOADING",
    VersionState.AVAILABLE: "READY",
    VersionState.UNLOADING: "UNLOADING",
    VersionState.END: "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One version of one servable; ``state`` is READY, LOADING, UNLOADING or UNAVAILABLE."""

    name: str
    version: str
    state: str
    reason: str


def repository_index(plane: DataPlane, *, only_ready: bool = False) -> list[IndexEntry]:
    """List every version, or only those that can be called, by name and then by number.

    What was never loaded, where that is for clients to ask for, has no version yet.
    """
    statuses = plane.statuses()
    names = [] if only_ready or plane.control is None else plane.control.names
    unloaded = [name for name in names if name not in statuses]
    entries = [
        IndexEntry(name, str(status.version), _STATES[status.state], status.reason)
        for name, versions in sorted(statuses.items())
        for status in sorted(versions, key=lambda status: status.version)
        if status.state is VersionState.AVAILABLE or not only_ready
    ]
    return sorted(
        [*entries, *(IndexEntry(name, "", "UNAVAILABLE", "") for name in unloaded)], key=lambda each: each.name
    )
