"""Questions that nobody has begun to answer, which are sent again in the order in which they were asked."""

from __future__ import annotations

import itertools
from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from ovmstrio.server.workers.links import Order

__all__ = ["LatePlace", "LateQuestions"]


class LateQuestions:
    """Those of one process that are late, by whom they are for and what they have in common.

    Attributes:
        lines: the late ones that are to be sent one after the other; few, as hardly any question is ever late.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[LatePlace]] = {}
        self._numbers = itertools.count()

    def place(self, row: int, order: Order) -> LatePlace:
        """Give a question its place among those that are late, should it be late, too."""
        return LatePlace(self, next(self._numbers), row, order)


class LatePlace:
    """Where a question is among those that are late; it has no place there unless it is.

    Attributes:
        number: is larger than those of questions that were asked before.
    """

    __slots__ = ("_is_late", "_late", "_moved", "_order", "_row", "number")

    def __init__(self, late: LateQuestions, number: int, row: int, order: Order) -> None:
        self.number = number
        self._late = late
        self._row = row
        self._order = order
        self._is_late = False
        self._moved: trio.Event | None = None

    @property
    def _line(self) -> tuple[int, str]:
        return self._row, repr(self._order)

    def may_go(self) -> bool:
        """Tell whether no question is late that was asked before this one, which is late as well otherwise."""
        if not self._late.lines:
            return True
        line = self._late.lines.get(self._line)
        if line is None or line[0].number >= self.number:
            return True
        self.join()
        return False

    def join(self) -> None:
        """Be late: what is asked from now on waits until this one has been sent, or given up."""
        if not self._is_late:
            self._is_late = True
            insort(self._late.lines.setdefault(self._line, []), self, key=attrgetter("number"))

    async def wait(self) -> None:
        """Wait for those that were asked before.

        Cancellation: at once.
        """
        # They may be about to hear that they are late.
        await trio.lowlevel.checkpoint()
        while not self.may_go():
            moved = self._moved = trio.Event()
            await moved.wait()

    def leave(self) -> None:
        """Let the next one go."""
        if self._is_late:
            self._is_late = False
            line = self._late.lines[self._line]
            line.remove(self)
            if not line:
                del self._late.lines[self._line]
            elif (moved := line[0]._moved) is not None:  # noqa: SLF001 - another one of this class
                moved.set()
