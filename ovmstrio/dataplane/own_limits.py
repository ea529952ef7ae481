"""Services that limit their calls themselves, as handler projects do over all their processes, with no queue.

::

    admit (before the body is read) ── place holds it ──> lease ── counted until the lease is given back
    call without a place ─────────────────────────────────> lease
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.limits import current_place

if TYPE_CHECKING:
    from ovmstrio.core.limits import CallPlace
    from ovmstrio.registry import Lease, Registry, VersionStatus

__all__ = ["OwnLimits", "count_call", "give_place"]


class OwnLimits:
    """Which services that are loaded now have a limit of their own.

    Args:
        registry: has them.

    Attributes:
        limited: the names of those whose limit says a number.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.limited: set[str] = set()
        for name in registry.statuses():
            self._look(name)
        registry.subscribe(self._follow)

    def hold(self, name: str, place: CallPlace) -> None:
        """Have a place count among those that a service allows itself, if it is loaded.

        Raises:
            TooManyRequests: there are as many as may be.
        """
        if name in self.limited and (limit := self._registry.concurrency_limit(name)) is not None:
            place.hold(limit)

    def _follow(self, status: VersionStatus) -> None:
        self._look(status.name)

    def _look(self, name: str) -> None:
        limit = self._registry.concurrency_limit(name)
        if limit is not None and limit.maximum:
            self.limited.add(name)
        else:
            self.limited.discard(name)


def give_place(lease: Lease, place: CallPlace | None) -> None:
    """Give a lease the place that was taken for its call, now or before."""
    lease.place = place
    taken = place or current_place.get()
    if taken is not None:
        lease.waited_seconds = taken.waited_seconds


def count_call(lease: Lease) -> None:
    """Count a call among those that its service allows itself, until the lease is given back; its place may be so.

    Raises:
        TooManyRequests: there are as many as may be.
    """
    if lease.concurrency_limit is None:
        return
    place = lease.place or current_place.get()
    held = None if place is None else place.pass_on()
    if held is None:
        held = lease.concurrency_limit
        held.take()
    lease.counted = held
