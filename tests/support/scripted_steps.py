"""Answers in parts that a test has written down: what comes, when it waits, and what fails it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Self, TypeVar

import trio

__all__ = ["ScriptedSteps"]

PartT = TypeVar("PartT")


class ScriptedSteps(Generic[PartT]):
    """Gives the parts of a script; waits at its events, and raises its errors.

    Args:
        steps: the script.
        waiting: is set when the script has come to an event.
    """

    def __init__(self, steps: Iterable[PartT | trio.Event | Exception], waiting: trio.Event) -> None:
        self._steps = iter(steps)
        self._waiting = waiting
        self.is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PartT:
        for step in self._steps:
            if isinstance(step, trio.Event):
                self._waiting.set()
                await step.wait()
            elif isinstance(step, Exception):
                self.is_over = True
                raise step
            else:
                await trio.lowlevel.checkpoint()
                return step
        self.is_over = True
        raise StopAsyncIteration
