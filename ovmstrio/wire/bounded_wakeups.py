"""A bound on the sockets that wake tasks in one turn of the event loop, so that thousands of them hold no other task.

trio wakes the tasks of all sockets that are ready, and runs each before it looks at the clock or at sockets again.
Where 5,000 clients leave at once, one turn would do the work of 5,000 ends.  The system keeps what is left, in order.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bound_wakeups"]

_MOST: Final = 64


class _BoundedPoll:
    """An epoll object that tells of a few events at a time."""

    __slots__ = ("_poll", "close", "modify", "register", "unregister")

    def __init__(self, epoll: select.epoll) -> None:
        self._poll: Callable[[float, int], Any] = epoll.poll
        self.close = epoll.close
        self.modify = epoll.modify
        self.register = epoll.register
        self.unregister = epoll.unregister

    def poll(self, timeout: float, _: int) -> Any:
        """Wait for events, and return some of those that there are."""
        return self._poll(timeout, _MOST)


def bound_wakeups() -> None:
    """Bound the sockets that wake tasks in one turn of the running loop.

    trio has no option for this bound, so the poll object of the loop is wrapped.  A trio without the object is left as
    it is.
    """
    core: Any = trio._core  # noqa: SLF001 - as above
    run = getattr(core, "_run", None)
    manager: Any = None if run is None else getattr(run.GLOBAL_RUN_CONTEXT.runner, "io_manager", None)
    if isinstance(getattr(manager, "_epoll", None), select.epoll):
        manager._epoll = _BoundedPoll(manager._epoll)  # noqa: SLF001 - as above
