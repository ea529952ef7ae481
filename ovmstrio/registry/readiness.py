"""Whether all that is configured can be called, and if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.registry.states import Readiness

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ovmstrio.registry.records import ServiceRecord

__all__ = ["readiness_at_start", "readiness_of", "why_not"]


def readiness_at_start(services: Collection[ServiceRecord], kinds: Iterable[str]) -> Readiness:
    """Tell how far the first pass has come, with the kinds in their order; nothing is ready before it has ended."""
    waiting = sorted(record.name for record in services if not record.settled)
    if not waiting:
        return Readiness(ready=False, reason="the configuration has not been applied yet")
    names = ", ".join(waiting[:5]) + (", ..." if len(waiting) > len(waiting[:5]) else "")
    return Readiness(
        ready=False, reason=f"loading {len(waiting)} of {len(services)} {_kinds(services, kinds)}: {names}"
    )


def readiness_of(services: Collection[ServiceRecord], *, when_empty: bool, when_failed: bool) -> Readiness:
    """Tell whether everything that is configured can be called.

    One that was added to a serving registry and is being loaded for the first time does not count yet: the
    server must not be taken out of rotation for it.
    """
    configured = [record for record in services if record.spec is not None]
    if not configured and not when_empty:
        return Readiness(ready=False, reason="no model is configured")
    failed = [record for record in configured if record.settled and not record.serving]
    if failed and not when_failed:
        reasons = (f'{record.kind.name} "{record.name}": {why_not(record)}' for record in failed)
        return Readiness(ready=False, reason="; ".join(reasons))
    obstacles = [text for record in configured for text in _obstacles(record)]
    return Readiness(ready=not obstacles, reason="; ".join(obstacles))


def _obstacles(record: ServiceRecord) -> list[str]:
    told = (record.kind.obstacle(instance.servable) for instance in {*record.serving.values()})
    return [text for text in told if text]


def _kinds(services: Collection[ServiceRecord], kinds: Iterable[str]) -> str:
    *first, last = [f"{name}s" for name in dict.fromkeys(kinds) if any(record.kind.name == name for record in services)]
    return f"{', '.join(first)} and {last}" if first else last


def why_not(record: ServiceRecord) -> str:
    """Tell why no version of a service can be called."""
    reasons = [
        f"version {each.version}: {each.reason}" for each in record.versions.values() if each.failure is not None
    ]
    return record.problem or "; ".join(reasons) or "; ".join(record.warnings) or "no version is available"
