"""When batches leave and who is in them: a policy without tasks and without a clock.

Items wait in groups, one a key, in the order of their arrival.  A batch is the front of one group.  It may leave when

- it is full: nothing that waits behind it in its group would fit into it,
- its first item has waited for as long as an item may,
- or, if the options say so, nothing else is running.

Of several batches that may leave, the one goes first whose first item came first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from ovmstrio.core.errors import Overloaded

__all__ = ["DEFAULT_MAX_WAITING", "BatchOptions", "BatchPolicy"]

_T = TypeVar("_T", bound=Hashable)

DEFAULT_MAX_WAITING: Final = 1024
"""How many items may wait unless something else is said."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How batches are made.

    Attributes:
        max_size: the sum of sizes at which a batch is full; an item that is larger runs alone.
        timeout_seconds: how long the first item of a batch waits for others; infinite waits until the batch is full.
        max_waiting: how many items may wait; more are refused.
        eager: whether a batch leaves at once while nothing else is running.
    """

    max_size: int
    timeout_seconds: float
    max_waiting: int = DEFAULT_MAX_WAITING
    eager: bool = False

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: a bound is below its least value, or not a number.
        """
        if self.max_size < 1 or self.max_waiting < 1 or not self.timeout_seconds >= 0:
            raise ValueError(f"max_size and max_waiting must be 1 or more and timeout_seconds 0 or more, got {self}")


class _QueuedItem(NamedTuple):
    key: Hashable
    size: int
    arrived: float
    number: int


class _Group(Generic[_T]):
    """The items of one key, in the order of arrival, and the sum of their sizes."""

    __slots__ = ("items", "size")

    def __init__(self) -> None:
        self.items: OrderedDict[_T, _QueuedItem] = OrderedDict()
        self.size = 0

    @property
    def first(self) -> _QueuedItem:
        """The place of the first item; there is one."""
        return next(iter(self.items.values()))


class BatchPolicy(Generic[_T]):
    """Decides which of the waiting items run together, and when; items are told apart by hash and equality.

    Every method but :meth:`take` takes the same time however many items wait; that one looks at each group that is
    full.
    """

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        self._places: OrderedDict[_T, _QueuedItem] = OrderedDict()
        self._groups: dict[Hashable, _Group[_T]] = {}
        self._full: dict[Hashable, _Group[_T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def arrive(self, item: _T, key: Hashable, size: int, now: float) -> None:
        """Let an item wait behind those of the same key; ``now`` is never less than before.

        Raises:
            Overloaded: as many items wait as may.
            ValueError: the size is below 1, or the item is waiting already.
        """
        if size < 1 or item in self._places:
            raise ValueError(f"an item arrives once and has a size of 1 or more, got {size}")
        if len(self._places) >= self.options.max_waiting:
            raise Overloaded(
                f"The queue for batches is full: {len(self._places)} requests wait, as many as may; try again later"
            )
        place = self._places[item] = _QueuedItem(key, size, now, self._count)
        self._count += 1
        group = self._groups.setdefault(key, _Group())
        group.items[item] = place
        group.size += size
        self._note(key, group)

    def leave(self, item: _T) -> None:
        """Forget an item that waits and is not wanted any more.

        Raises:
            KeyError: it does not wait.
        """
        self._remove(item)

    def take(self, now: float, *, idle: bool = False) -> list[_T]:
        """Take the batch that is to run now, nothing if none is; called when there is somebody to run it.

        ``idle`` tells that nothing else is running.  At an infinite time, whatever waits may leave.
        """
        group = self._due(now, idle=idle)
        if group is None:
            return []
        batch: list[_T] = []
        left = self.options.max_size
        for item, place in group.items.items():
            if batch and place.size > left:
                break
            batch.append(item)
            left -= place.size
        for item in batch:
            self._remove(item)
        return batch

    def next_time(self, *, idle: bool = False) -> float:
        """Tell from when on :meth:`take` will give a batch if nothing else happens; infinite if never."""
        if not self._places:
            return math.inf
        if self._full or (idle and self.options.eager):
            return -math.inf
        return self._oldest.arrived + self.options.timeout_seconds

    def clear(self) -> list[_T]:
        """Forget every item, and give them in the order of arrival."""
        items = list(self._places)
        for item in items:
            self._remove(item)
        return items

    @property
    def _oldest(self) -> _QueuedItem:
        return next(iter(self._places.values()))

    def _due(self, now: float, *, idle: bool) -> _Group[_T] | None:
        if not self._places:
            return None
        oldest = self._oldest
        # Every item may wait equally long, so that the oldest of all is the first whose time is over.
        if oldest.arrived + self.options.timeout_seconds <= now or (idle and self.options.eager):
            return self._groups[oldest.key]
        return min(self._full.values(), key=lambda group: group.first.number, default=None)

    def _remove(self, item: _T) -> None:
        place = self._places.pop(item)
        group = self._groups[place.key]
        del group.items[item]
        group.size -= place.size
        if not group.items:
            del self._groups[place.key]
        self._note(place.key, group)

    def _note(self, key: Hashable, group: _Group[_T]) -> None:
        if group.size >= self.options.max_size:
            self._full[key] = group
        else:
            self._full.pop(key, None)
