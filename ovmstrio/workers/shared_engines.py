"""Text-model engines that one worker owns and other workers call by RPC."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.models.sequences.requests import owner_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ovmstrio.core.errors import ServerError
    from ovmstrio.core.worker_peers import ExportedEngine
    from ovmstrio.workers.rpc import WorkerRpc

CALL_ENGINE: Final = "ask engine"
LISTEN_ENGINE: Final = "hear engine"
"""RPC names."""
_LOAD_WAIT_SECONDS: Final = 60.0
"""Time that a call waits for an engine to be loaded here, before another engine of the model is used."""
_POLL_SECONDS: Final = 1.0


class WorkerEngines:
    """Engines of all workers; see ``EngineSharing``."""

    def __init__(self, peers: WorkerRpc) -> None:
        self.row = peers.row
        self.rows = peers.rows
        self._peers = peers
        self._exported: dict[str, ExportedEngine] = {}
        self._errors: dict[str, tuple[str, ServerError]] = {}
        self._substitutes: dict[tuple[int, str], str] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def owner(self, name: str) -> int | None:
        """Return the worker that owns a model's engine; None if this worker does."""
        row = owner_index(name, self.rows)
        return None if row == self.row else row

    @contextmanager
    def shown(self, key: str, engine: ExportedEngine) -> Iterator[None]:
        """Export an engine within the block; the last one of a key is used."""
        self._exported[key] = engine
        self._errors.pop(_model_of(key), None)
        self._changed.unpark_all()
        try:
            yield
        finally:
            if self._exported.get(key) is engine:
                del self._exported[key]
                self._substitutes = {call: chosen for call, chosen in self._substitutes.items() if chosen != key}

    def refuse(self, key: str, error: ServerError) -> None:
        """Set the error for calls of a missing engine; as ``EngineSharing.refuse``."""
        self._errors[_model_of(key)] = key, error
        self._changed.unpark_all()

    async def leave(self, seconds: float) -> None:
        """Stop the engines for other workers; they call the next worker."""
        async with trio.open_nursery() as nursery:
            for engine in self._exported.values():
                nursery.start_soon(engine.leave, seconds)

    async def call(self, owner: int, key: str, value: Any) -> Any:
        """Call another worker's engine; as ``EngineSharing.call``."""
        return await self._peers.ask(owner, [CALL_ENGINE, key, self.row, value])

    async def listen(self, owner: int, key: str, heard: Callable[[Any], None]) -> None:
        """Receive the output of another worker's engine; as ``EngineSharing.listen``."""
        await self._peers.listen(owner, [LISTEN_ENGINE, key, self.row], heard)

    async def wait_change(self) -> None:
        """Wait until another worker has started or exited, for at most a second."""
        with trio.move_on_after(_POLL_SECONDS):
            await self._peers.wait_change()

    async def answer(self, question: str, arguments: Sequence[Any]) -> Any:
        """Handle an RPC.

        Raises:
            NotReady: there is no such engine here.
            ServerError: as the engine.
        """
        key, row, *value = arguments
        if question == LISTEN_ENGINE:
            with trio.move_on_after(_LOAD_WAIT_SECONDS):
                while key not in self._exported:
                    self._check_refused(key)
                    await self._changed.park()
            return await self._choose(row, key).listen(row)
        return await self._find(self._substitutes.get((row, key), key)).call(row, *value)

    def _check_refused(self, key: str) -> None:
        refused, error = self._errors.get(_model_of(key), (None, None))
        if refused == key and error is not None:
            raise error

    def _choose(self, row: int, key: str) -> ExportedEngine:
        """Return the engine of a key, or else of the same model, as a restarted worker may have newer settings."""
        self._substitutes.pop((row, key), None)
        if key not in self._exported:
            same = [other for other in self._exported if _model_of(other) == _model_of(key)]
            if same:
                self._substitutes[row, key] = key = same[-1]
        return self._find(key)

    def _find(self, key: str) -> ExportedEngine:
        if key not in self._exported:
            raise NotReady("engine not found on this worker: configuration differs")
        return self._exported[key]


def _model_of(key: str) -> str:
    return key.rpartition(" ")[0]
