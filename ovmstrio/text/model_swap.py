"""A model that is loaded anew where two copies do not fit: the old one gives its memory back first.

::

    old model: requests under way end ─> its process ends ─┬─> the new one is ready: who waited goes on with that
               new ones wait                               └─> it cannot be loaded: the old one is started again
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ovmstrio.text.engine_sharing import Engine

__all__ = ["Handover", "RunningModels", "bytes_of_weights"]

log = structlog.get_logger(__name__)

_OBSTACLE: Final = "it is being replaced, and two of it do not fit into the memory"
_WEIGHTS: Final = "*.bin"

ModelT = TypeVar("ModelT")


class Handover(Generic[ModelT]):
    """What comes after one model, and who uses that model.

    Args:
        process: the model's.
        name: of the model.

    Attributes:
        successor: the model that answers in its place; None as long as it answers itself.
        obstacle: why requests wait; empty if they do not.
    """

    def __init__(self, process: Engine, name: str) -> None:
        self.successor: ModelT | None = None
        self.obstacle = ""
        self._process = process
        self._name = name
        self._users = 0
        self._unused = trio.Event()
        self._is_over = trio.Event()

    @asynccontextmanager
    async def using(self) -> AsyncIterator[ModelT | None]:
        """Use the model, or what is given in its place, while the block lasts; waits while it is being replaced.

        Cancellation: while it waits.
        """
        while self.obstacle:
            await self._is_over.wait()
        if self.successor is not None:
            yield self.successor
            return
        self._users += 1
        try:
            yield None
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    @asynccontextmanager
    async def giving_way(self) -> AsyncIterator[None]:
        """Have no process while the block lasts, once those who use the model have ended.

        The block sets ``successor``; without one the model answers again.

        Cancellation: while others use the model, which goes on then.
        """
        log.info("the model gives way to a new one, for two do not fit", model=self._name)
        self.obstacle, self._is_over = _OBSTACLE, trio.Event()
        try:
            while self._users:
                self._unused = trio.Event()
                await self._unused.wait()
            await self._process.sleep()
            yield
        finally:
            self.obstacle = ""
            self._is_over.set()


class RunningModels(Generic[ModelT]):
    """The models of a server that answer, by their names."""

    def __init__(self) -> None:
        self._handovers: dict[str, Handover[ModelT]] = {}

    def get(self, name: str) -> Handover[ModelT] | None:
        """Give the handover of the model that answers under a name."""
        return self._handovers.get(name)

    def begins(self, name: str, handover: Handover[ModelT]) -> None:
        """Note that a model answers."""
        self._handovers[name] = handover

    def ends(self, name: str, handover: Handover[ModelT]) -> None:
        """Note that it does not any more."""
        if self._handovers.get(name) is handover:
            del self._handovers[name]


def bytes_of_weights(*folders: Path | None) -> int:
    """Tell how much memory the weights of models take, by the sizes of their files; blocking."""
    return sum(file.stat().st_size for folder in folders if folder is not None for file in folder.glob(_WEIGHTS))
