"""Which versions are in memory and on disk, and which have to go: a policy without threads and without a clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["UsagePolicy"]

_K = TypeVar("_K", bound=Hashable)


class UsagePolicy(Generic[_K]):
    """Keeps the most recently used of what is in memory and on disk, and all that is leased.

    What is in memory is never taken off the disk.  Both limits hold whenever what is leased allows it.

    Args:
        memory_limit: how many may be in memory; None for all.
        disk_limit: how many may be on disk, no fewer than in memory; None for all.
    """

    def __init__(self, memory_limit: int | None = None, disk_limit: int | None = None) -> None:
        self._memory_limit = memory_limit
        self._disk_limit = disk_limit
        self._memory: OrderedDict[_K, None] = OrderedDict()
        self._disk: OrderedDict[_K, None] = OrderedDict()
        self._leases: Counter[_K] = Counter()

    @property
    def in_memory(self) -> tuple[_K, ...]:
        """What is in memory, the least recently used first."""
        return tuple(self._memory)

    @property
    def on_disk(self) -> tuple[_K, ...]:
        """What is on disk, the least recently used first."""
        return tuple(self._disk)

    def touch(self, key: _K) -> None:
        """Note that something is used now."""
        for place in (self._memory, self._disk):
            if key in place:
                place.move_to_end(key)

    def lease(self, key: _K) -> None:
        """Keep something where it is, or will be, until :meth:`release` has been called as often as this."""
        self._leases[key] += 1

    def release(self, key: _K) -> None:
        """Give a lease back; ask what has to go then."""
        self._leases[key] -= 1
        if not self._leases[key]:
            del self._leases[key]

    def add_to_memory(self, key: _K) -> None:
        """Note that something is in memory, or is about to be, as the most recently used."""
        self._memory[key] = None
        self._memory.move_to_end(key)

    def add_to_disk(self, key: _K) -> None:
        """Note that something is on disk, or is about to be, as the most recently used."""
        self._disk[key] = None
        self._disk.move_to_end(key)

    def drop_from_memory(self, key: _K) -> None:
        """Note that something is not in memory."""
        self._memory.pop(key, None)

    def drop_from_disk(self, key: _K) -> None:
        """Note that something is not on disk."""
        self._disk.pop(key, None)

    def evict_from_memory(self) -> list[_K]:
        """Choose what has to leave the memory, and take it as gone from there."""
        return self._evict(self._memory, self._memory_limit, {})

    def evict_from_disk(self) -> list[_K]:
        """Choose what has to leave the disk, and take it as gone from there; evict from memory before."""
        return self._evict(self._disk, self._disk_limit, self._memory)

    def _evict(self, place: OrderedDict[_K, None], limit: int | None, kept: dict[_K, None]) -> list[_K]:
        excess = 0 if limit is None else len(place) - limit
        if excess <= 0:
            return []
        victims = [key for key in place if key not in self._leases and key not in kept][:excess]
        for key in victims:
            del place[key]
        return victims
