"""A cancel scope that calls which never block share, one after the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class ReusableScope:
    """Cancel scope that a task enters once and uses for consecutive calls.

    A call that never blocks cannot be cancelled meanwhile and leaves the scope unchanged. The first call that blocks
    keeps the scope and the task, and leaves the scope when it ends. Cancelling the scope between calls ends the task.

    Attributes:
        scope: the scope in use.
        is_kept: the current call blocks, or has blocked.
    """

    __slots__ = ("_has_deadline", "_has_exited", "is_kept", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_kept = self._has_exited = self._has_deadline = False

    def __enter__(self) -> Self:
        self.scope.__enter__()
        return self

    def lend(self, deadline: float) -> trio.CancelScope:
        """Return the scope with the deadline of a call, in trio time; ``math.inf`` for none."""
        if deadline != math.inf:
            self._has_deadline, self.scope.deadline = True, deadline
        return self.scope

    def take_back(self, error: BaseException | None) -> bool:
        """Reclaim the scope after a call; return whether the scope caught the call's error."""
        scope = self.scope
        if self.is_kept:
            self._has_exited = True
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
        return False if self._has_exited else self.scope.__exit__(kind, error, traceback)
