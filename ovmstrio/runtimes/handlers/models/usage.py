"""What was used least recently and has to go: a policy without threads and without a clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["RecentlyUsed"]

_K = TypeVar("_K", bound=Hashable)


class RecentlyUsed(Generic[_K]):
    """What is in one place, the least recently used first.

    Args:
        limit: how many may be there, whenever what is in use allows it; None for all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._keys: OrderedDict[_K, None] = OrderedDict()

    def __contains__(self, key: _K) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[_K]:
        return iter(self._keys)

    def touch(self, key: _K) -> None:
        """Note that something is used now, if it is here."""
        if key in self._keys:
            self._keys.move_to_end(key)

    def add(self, key: _K) -> None:
        """Note that something is here, or is about to be, as the most recently used."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def drop(self, key: _K) -> None:
        """Note that something is not here."""
        self._keys.pop(key, None)

    def evict(self, is_needed: Callable[[_K], bool]) -> list[_K]:
        """Choose what has to go, none of it needed, and take it as gone."""
        excess = 0 if self._limit is None else len(self._keys) - self._limit
        if excess <= 0:
            return []
        victims = [key for key in self._keys if not is_needed(key)][:excess]
        for key in victims:
            del self._keys[key]
        return victims
