"""Engines of models that one process of a server has, and the others ask by the link between processes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.models.sequences.requests import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ovmstrio.core.errors import ServerError
    from ovmstrio.core.worker_peers import ShownToOthers
    from ovmstrio.workers.rpc import Peers

__all__ = ["ASK_ENGINE", "HEAR_ENGINE", "WorkerEngines"]

ASK_ENGINE: Final = "ask engine"
HEAR_ENGINE: Final = "hear engine"
"""What processes ask that share engines."""
_UNKNOWN_SECONDS: Final = 60.0
"""How long it is waited for a process to load what another one has loaded, before what it has is taken for it."""
_LOOK_SECONDS: Final = 1.0


class WorkerEngines:
    """The engines of a server, as one of its processes sees them; see ``EngineSharing``.

    Args:
        peers: the other processes.
    """

    def __init__(self, peers: Peers) -> None:
        self.row = peers.row
        self.rows = peers.rows
        self._peers = peers
        self._shown: dict[str, ShownToOthers] = {}
        self._refused: dict[str, tuple[str, ServerError]] = {}
        self._chosen: dict[tuple[int, str], str] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def owner(self, name: str) -> int | None:
        """Tell which other process has the engine of a model; None if it is this one."""
        row = owner_of(name, self.rows)
        return None if row == self.row else row

    @contextmanager
    def shown(self, key: str, engine: ShownToOthers) -> Iterator[None]:
        """Let others ask an engine within the block; of two with one key, the one that came last."""
        self._shown[key] = engine
        self._refused.pop(_model_of(key), None)
        self._changed.unpark_all()
        try:
            yield
        finally:
            if self._shown.get(key) is engine:
                del self._shown[key]
                self._chosen = {asked: chosen for asked, chosen in self._chosen.items() if chosen != key}

    def refuse(self, key: str, error: ServerError) -> None:
        """Tell others why there is no engine; as ``EngineSharing.refuse``."""
        self._refused[_model_of(key)] = key, error
        self._changed.unpark_all()

    async def leave(self, seconds: float) -> None:
        """Let requests of others end, and have them ask the next process for more.

        Cancellation: at once.
        """
        async with trio.open_nursery() as nursery:
            for engine in self._shown.values():
                nursery.start_soon(engine.leave, seconds)

    # What is asked of others

    async def call(self, owner: int, key: str, value: Any) -> Any:
        """Ask the engine of another process; as ``EngineSharing.call``."""
        return await self._peers.ask(owner, [ASK_ENGINE, key, self.row, value])

    async def listen(self, owner: int, key: str, heard: Callable[[Any], None]) -> None:
        """Hear the engine of another process; as ``EngineSharing.listen``."""
        await self._peers.listen(owner, [HEAR_ENGINE, key, self.row], heard)

    async def wait_change(self) -> None:
        """Wait until another process has begun or ended, or a second.

        Cancellation: at once.
        """
        with trio.move_on_after(_LOOK_SECONDS):
            await self._peers.wait_change()

    # What others ask

    async def answer(self, question: str, arguments: Sequence[Any]) -> Any:
        """Answer another process.

        Raises:
            NotReady: there is no such engine here.
            ServerError: as the engine.

        Cancellation: as the engine.
        """
        key, row, *value = arguments
        if question == HEAR_ENGINE:
            with trio.move_on_after(_UNKNOWN_SECONDS):
                while key not in self._shown:
                    self._check_refused(key)
                    await self._changed.park()
            return await self._choose(row, key).listen(row)
        return await self._find(self._chosen.get((row, key), key)).call(row, *value)

    def _check_refused(self, key: str) -> None:
        """See that an engine may be to come.

        Raises:
            ServerError: it could not be loaded.
        """
        refused, error = self._refused.get(_model_of(key), (None, None))
        if refused == key and error is not None:
            raise error

    def _choose(self, row: int, key: str) -> ShownToOthers:
        """Give the engine that a process gets for a key: that of the key, or of the same model as it is served here.

        A process that was started anew may have read what the others have not yet.

        Raises:
            NotReady: there is none.
        """
        self._chosen.pop((row, key), None)
        if key not in self._shown:
            same = [other for other in self._shown if _model_of(other) == _model_of(key)]
            if same:
                self._chosen[row, key] = key = same[-1]
        return self._find(key)

    def _find(self, key: str) -> ShownToOthers:
        if key not in self._shown:
            raise NotReady("this worker has no such engine, for it serves another configuration")
        return self._shown[key]


def _model_of(key: str) -> str:
    """Give a key's part before what it says of settings."""
    return key.rpartition(" ")[0]
