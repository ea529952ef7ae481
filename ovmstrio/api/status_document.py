"""The states of a servable's versions in OVMS's form, which is TensorFlow Serving's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.registry import VersionStatus

__all__ = ["status_document"]


def status_document(versions: Sequence[VersionStatus]) -> dict[str, Any]:
    """Describe versions; the reason of a failure is an addition to OVMS's form."""
    return {"model_version_status": [_entry(status) for status in versions]}


def _entry(status: VersionStatus) -> dict[str, Any]:
    said = {"error_code": status.error_code, "error_message": status.error_code}
    if status.reason:
        said["reason"] = status.reason
    return {"version": str(status.version), "state": status.state.name, "status": said}
