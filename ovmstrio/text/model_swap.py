"""Model swap on reload: unloads the old model first if two copies do not fit into memory.

::

    old model: running requests end ─> its process ends ─┬─> new model ready: waiting requests go there
               new requests wait                         └─> load failed: the old model restarts
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

log = structlog.get_logger(__name__)

_SWAPPING: Final = "the model is being reloaded, because two copies do not fit into memory"
_WEIGHTS: Final = "*.bin"

ModelT = TypeVar("ModelT")


class ModelSwap(Generic[ModelT]):
    """Users and successor of one model.

    Args:
        process: the model's engine.
        name: model name.

    Attributes:
        successor: the model that serves instead; None while this one serves.
        unready_reason: why requests wait; empty if they do not.
    """

    def __init__(self, process: Engine, name: str) -> None:
        self.successor: ModelT | None = None
        self.unready_reason = ""
        self._process = process
        self._name = name
        self._users = 0
        self._unused = trio.Event()
        self._swap_over = trio.Event()

    @asynccontextmanager
    async def using(self) -> AsyncIterator[ModelT | None]:
        """Yield the successor, or None to use the model itself; waits during a swap."""
        while self.unready_reason:
            await self._swap_over.wait()
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
    async def unloading_for_successor(self) -> AsyncIterator[None]:
        """Unload the model for the duration of the block, after its running requests have ended.

        The block sets ``successor``; without one the model serves again.
        """
        log.info("unloading old version before reload: not enough memory", model=self._name)
        self.unready_reason, self._swap_over = _SWAPPING, trio.Event()
        try:
            while self._users:
                self._unused = trio.Event()
                await self._unused.wait()
            await self._process.sleep()
            yield
        finally:
            self.unready_reason = ""
            self._swap_over.set()


class ServingModels(Generic[ModelT]):
    """The serving models by name."""

    def __init__(self) -> None:
        self._handovers: dict[str, ModelSwap[ModelT]] = {}

    def get(self, name: str) -> ModelSwap[ModelT] | None:
        """Return the handover of a serving model, or None."""
        return self._handovers.get(name)

    def begins(self, name: str, handover: ModelSwap[ModelT]) -> None:
        """Register a serving model."""
        self._handovers[name] = handover

    def ends(self, name: str, handover: ModelSwap[ModelT]) -> None:
        """Unregister a model, unless another one has replaced it."""
        if self._handovers.get(name) is handover:
            del self._handovers[name]


def weight_bytes(*folders: Path | None) -> int:
    """Return the size of the weight files in model folders; blocking."""
    return sum(file.stat().st_size for folder in folders if folder is not None for file in folder.glob(_WEIGHTS))
