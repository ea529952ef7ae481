"""Calling once more what takes long, and taking the first answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from ovmstrio.core.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["hedged"]

_T = TypeVar("_T")


async def hedged(
    call: Callable[[], Awaitable[_T]], after_seconds: float, *, is_final: Callable[[ServerError], bool]
) -> _T:
    """Give the first answer of a call, or of the same one made again when none has come after so many seconds.

    A call that fails before that is not made again.

    Raises:
        ServerError: the first failure, if both have failed; one that is final ends both.

    Cancellation: at any checkpoint; both are cancelled, as is the slower one.
    """
    race = _Race(call, is_final)
    async with trio.open_nursery() as nursery:
        race.begin(nursery)
        with trio.move_on_after(after_seconds):
            await race.over.wait()
        if not race.over.is_set():
            race.begin(nursery)
            await race.over.wait()
        nursery.cancel_scope.cancel()
    if race.answers:
        return race.answers[0]
    raise race.failures[0]


class _Race(Generic[_T]):
    def __init__(self, call: Callable[[], Awaitable[_T]], is_final: Callable[[ServerError], bool]) -> None:
        self._call = call
        self._is_final = is_final
        self._running = 0
        self.answers: list[_T] = []
        self.failures: list[ServerError] = []
        self.over = trio.Event()

    def begin(self, nursery: trio.Nursery) -> None:
        """Make the call once more."""
        self._running += 1
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            self.answers.append(await self._call())
        except ServerError as error:
            self._running -= 1
            # What is final is what is told.
            self.failures.insert(0 if self._is_final(error) else len(self.failures), error)
            if self._running and not self._is_final(error):
                return
        self.over.set()
