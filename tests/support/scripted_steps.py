"""Answers in parts that a test has written down: what comes, when it waits, and what fails it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import trio

from ovmstrio.core.request import ServableMetadata

PartT = TypeVar("PartT")
AskedT = TypeVar("AskedT")


class _Steps(Protocol):
    is_over: bool


StepsT = TypeVar("StepsT", bound=_Steps)


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


@dataclass
class ScriptedService(Generic[AskedT]):
    """What services have in common that answer as a test has written down.

    Attributes:
        refusal: what every request is refused with.
        requests: everything that it was asked.
        left: set when a request was left before its end.
        waiting: set when a request waits for an event.
    """

    name: str
    refusal: Exception | None = None
    requests: list[AskedT] = field(default_factory=list)
    left: trio.Event = field(default_factory=trio.Event)
    waiting: trio.Event = field(default_factory=trio.Event)

    @property
    def metadata(self) -> ServableMetadata:
        return ServableMetadata(self.name, "Scripted", (), ())

    def note(self, asked: AskedT) -> None:
        self.requests.append(asked)
        if self.refusal is not None:
            raise self.refusal

    @asynccontextmanager
    async def answering(self, running: StepsT) -> AsyncIterator[StepsT]:
        try:
            yield running
        finally:
            if not running.is_over:
                self.left.set()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
