"""Engines of models that several processes of a server share: one of them has it, and the others ask that one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ovmstrio.core.errors import ServerError

__all__ = ["EngineSharing", "PartedAnswer", "ShownToOthers"]


class PartedAnswer(ABC):
    """An answer to another process that comes in parts, plain data each."""

    def __aiter__(self) -> PartedAnswer:
        """Give the parts."""
        return self

    @abstractmethod
    async def __anext__(self) -> Any:
        """Wait for the next part.

        Raises:
            ServerError: there will be none, because of that.

        Cancellation: at once.
        """

    @abstractmethod
    def close(self) -> None:
        """Note that nobody takes parts any more; called once."""


class ShownToOthers(Protocol):
    """An engine, as the process has it that others ask."""

    async def call(self, row: int, value: Any) -> Any:
        """Answer what another process asks of the engine, as plain data.

        Raises:
            ServerError: there is no engine now.

        Cancellation: at once.
        """
        ...

    async def listen(self, row: int) -> PartedAnswer:
        """Give what the engine tells of another process's requests, once it has been loaded.

        Raises:
            ServerError: it cannot be loaded.

        Cancellation: at once.
        """
        ...

    async def leave(self, seconds: float) -> None:
        """Take no more requests of others, and let those that there are end.

        Cancellation: at once.
        """
        ...


class EngineSharing(Protocol):
    """The processes of a server, as one of them sees them.

    Attributes:
        row: this one's number.
        rows: how many there are.
    """

    row: int
    rows: int

    def owner(self, name: str) -> int | None:
        """Tell which other process has the engine of a model; None if it is this one."""
        ...

    def shown(self, key: str, engine: ShownToOthers) -> AbstractContextManager[None]:
        """Let others ask an engine within the block, by a key that they have as well."""
        ...

    def refuse(self, key: str, error: ServerError) -> None:
        """Have others be told why there is no engine, until there is one of the key, or another one is refused."""
        ...

    async def call(self, owner: int, key: str, value: Any) -> Any:
        """Ask the engine of another process.

        Raises:
            NotReady: that process cannot be reached, ended before it answered, or has no such engine.
            ServerError: what it raised.

        Cancellation: at once, and there, too.
        """
        ...

    async def listen(self, owner: int, key: str, heard: Callable[[Any], None]) -> None:
        """Have what another process's engine tells handed over, until it has no more.

        Raises:
            NotReady: that process cannot be reached, has ended, or has no such engine after a while.
            ServerError: the engine cannot be loaded there.

        Cancellation: at once; requests that are open there end.
        """
        ...

    async def wait_change(self) -> None:
        """Wait until another process has begun or ended, but not for long.

        Cancellation: at once.
        """
        ...
