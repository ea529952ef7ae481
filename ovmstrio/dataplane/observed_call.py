"""A call that is neither an inference nor a stream of them, under its lease and with its event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from ovmstrio.core.events import CANCELLED

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.servable import Service
    from ovmstrio.dataplane.answer_room import Room
    from ovmstrio.registry import Lease

__all__ = ["ObservedCall", "code_of"]

End = Callable[["CallEvent", BaseException | None], None]


class ObservedCall:
    """One call, which ends with its ``with`` block, or later if the block hands it over.

    Attributes:
        service: what is called.
        takes: the calls that it takes.
        event: what observers see of it; whoever answers the call may set its sizes, and its code where the failure
            becomes an answer.
    """

    __slots__ = ("_end", "_is_handed_over", "_lease", "_room", "event", "service", "takes")

    def __init__(self, lease: Lease, event: CallEvent, end: End, room: Room | None = None) -> None:
        self.service: Service = lease.servable
        self.takes = lease.takes
        self.event = event
        self._lease = lease
        self._end = end
        self._room = room
        self._is_handed_over = False

    def hand_over(self) -> Callable[[], None]:
        """Let the call go on behind its block, such as for the rest of an answer; what is given must be called once."""
        self._is_handed_over = True
        self._leave_room(0)
        return self._finish

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or not self._is_handed_over:
            self._finish(error)

    def _leave_room(self, sent: int) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.leave(sent)

    def _finish(self, error: BaseException | None = None) -> None:
        self._leave_room(self.event.sent)
        try:
            self._end(self.event, error)
        finally:
            self._lease.release()


def code_of(error: BaseException) -> str:
    """Give the name by which metrics know an error; cancellation has one, be it of several tasks."""
    cancelled = isinstance(error, trio.Cancelled) or (
        isinstance(error, BaseExceptionGroup) and error.split(trio.Cancelled)[1] is None
    )
    return CANCELLED if cancelled else type(error).__name__
