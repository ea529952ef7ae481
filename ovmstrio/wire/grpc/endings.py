"""The calls of connections that end: they are cancelled a few at a time, so that the calls of others come between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.wire.batches import Pace

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.wire.grpc.stream import Call

__all__ = ["Endings"]

_CALLS_AT_ONCE: Final = 32
_PASSES: Final = 2
"""In the first the calls are told, and in the second most of them have ended, and their memory has been let go."""


class Endings:
    """Cancels the calls of connections that end, one connection after the other.

    Attributes:
        pace: of the connections' own ends.
    """

    __slots__ = ("_turn", "pace")

    def __init__(self) -> None:
        self.pace = Pace()
        self._turn: trio.Lock | None = None

    async def cancel(self, calls: Collection[Call]) -> None:
        """Cancel calls whose client is gone; some may not have ended when this returns.

        Cancellation: at any time; the rest of the calls is the caller's to cancel.
        """
        if not calls:
            return
        if self._turn is None:
            self._turn = trio.Lock()
        left = list(calls)
        async with self._turn:
            while left:
                for call in left[-_CALLS_AT_ONCE:]:
                    call.forsake()
                del left[-_CALLS_AT_ONCE:]
                for _ in range(_PASSES):
                    await trio.lowlevel.checkpoint()
