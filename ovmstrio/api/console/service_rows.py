"""What the console tells of each service in its list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.registry.states import OK, VersionState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.registry.states import VersionStatus

__all__ = ["service_row", "service_rows"]


def service_rows(plane: DataPlane) -> dict[str, dict[str, Any]]:
    """Give a row for each name, with the states of its versions and why it cannot be called, if it cannot."""
    return {name: service_row(plane, name, versions) for name, versions in plane.statuses().items()}


def service_row(plane: DataPlane, name: str, versions: Sequence[VersionStatus]) -> dict[str, Any]:
    """Give the row of one name."""
    registry = plane.registry
    kind = registry.kinds.get(registry.kind_of(name))
    state = _state(versions)
    if state == "unloaded" and registry.is_configured(name):
        state = "failed"
    reason = "" if state == "ready" else next((each.reason for each in reversed(versions) if each.reason), "")
    if not reason and state not in {"ready", "unloaded"}:
        reason = registry.why_not(name)
    return {
        "name": name,
        "kind": registry.kind_of(name),
        "takes": sorted(each.name.lower() for each in kind.takes) if kind is not None else [],
        "state": state,
        "reason": reason,
        "versions": [_version(each) for each in versions],
    }


def _state(versions: Sequence[VersionStatus]) -> str:
    """Say in a word what a service is in: a new version that fails leaves the old one serving, which is degraded."""
    available = [each for each in versions if each.state is VersionState.AVAILABLE]
    failed = any(each.error_code != OK and each.state is not VersionState.END for each in versions)
    if available:
        return "degraded" if failed else "ready"
    if any(each.state <= VersionState.LOADING and each.error_code == OK for each in versions):
        return "loading"
    return "failed" if any(each.error_code != OK for each in versions) else "unloaded"


def _version(status: VersionStatus) -> dict[str, Any]:
    return {
        "version": str(status.version),
        "state": status.state.name,
        "reason": status.reason,
        "load_seconds": status.load_seconds,
        "memory_bytes": status.grown_bytes,
    }
