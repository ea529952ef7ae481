"""Whether what is configured is there to be called, and if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.registry.states import Readiness

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.registry.records import ModelRecord

__all__ = ["readiness_at_start", "readiness_of"]


def readiness_at_start(models: Collection[ModelRecord]) -> Readiness:
    """Tell how far the first pass has come; nothing is ready before it has ended."""
    waiting = sorted(model.name for model in models if not model.settled)
    if not waiting:
        return Readiness(ready=False, reason="the configuration has not been applied yet")
    names = ", ".join(waiting[:5]) + (", ..." if len(waiting) > len(waiting[:5]) else "")
    return Readiness(ready=False, reason=f"loading {len(waiting)} of {len(models)} {_kinds(models)}: {names}")


def readiness_of(models: Collection[ModelRecord], *, when_empty: bool, when_failed: bool) -> Readiness:
    """Tell whether everything that is configured can be called.

    One that was added to a serving registry and is being loaded for the first time does not count yet: the
    server must not be taken out of rotation for it.
    """
    configured = [model for model in models if model.spec is not None]
    if not configured and not when_empty:
        return Readiness(ready=False, reason="no model is configured")
    failed = [model for model in configured if model.settled and not model.serving]
    if failed and not when_failed:
        return Readiness(ready=False, reason="; ".join(_why(model) for model in failed))
    return Readiness(ready=True)


def _kinds(models: Collection[ModelRecord]) -> str:
    kinds = sorted({model.kind for model in models}, key=lambda kind: kind.rank)
    *first, last = [f"{kind.name}s" for kind in kinds]
    return f"{', '.join(first)} and {last}" if first else last


def _why(model: ModelRecord) -> str:
    reasons = [
        f"version {record.version}: {record.reason}" for record in model.versions.values() if record.failure is not None
    ]
    why = model.problem or "; ".join(reasons) or "no version is available"
    return f'{model.kind.name} "{model.name}": {why}'
