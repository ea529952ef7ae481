"""One cancel scope for all calls that a task answers without waiting: to make and enter one costs a tenth of a call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["LentScope"]


class LentScope:
    """A cancel scope that a task has entered before its calls, and lends to one of them after the other.

    A call that never waits cannot be cancelled meanwhile, and gives the scope back as it was.  The first one that
    waits keeps it, and the task with it: it leaves the scope when it ends.

    Between calls the scope is the task's own, which ends when it is cancelled.

    Ownership: of the scope, until the ``with`` block ends or the call that keeps it.

    Attributes:
        scope: what is lent.
        is_kept: whether the call that has it waits, or has waited.
    """

    __slots__ = ("_has_deadline", "_is_left", "is_kept", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_kept = self._is_left = self._has_deadline = False

    def __enter__(self) -> Self:
        self.scope.__enter__()
        return self

    def lend(self, deadline: float) -> trio.CancelScope:
        """Give the scope to a call with this deadline, in trio's time; ``math.inf`` for none."""
        if deadline != math.inf:
            self._has_deadline, self.scope.deadline = True, deadline
        return self.scope

    def take_back(self, error: BaseException | None) -> bool:
        """Have it back from a call that ended with this error, if with any; tells whether the scope has caught that."""
        scope = self.scope
        if self.is_kept:
            self._is_left = True
            return scope.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        if scope.cancel_called:
            scope.__exit__(None, None, None)
            self.scope = trio.CancelScope()
            self.scope.__enter__()
        elif self._has_deadline:
            scope.deadline = math.inf
        self._has_deadline = False
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return False if self._is_left else self.scope.__exit__(kind, error, traceback)
