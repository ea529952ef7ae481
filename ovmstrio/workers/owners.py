"""Ownership of sequences and text engines: a hash of the name selects the owner; other workers forward calls to it.

A sequence belongs to the worker of ``hash(model, id)``, a text engine to that of ``hash(model)``.  So no worker needs
to know what the others own, and the successor of a worker owns the same.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import NotReady, NotSupported, TooManySequences, WorkerRestarting
from ovmstrio.core.tensor import BY_NAME, Tensor
from ovmstrio.core.worker_peers import ForwardedStep, StepResult
from ovmstrio.isolation.messages import PackedMessage
from ovmstrio.models.sequences.manager import TOO_MANY_SEQUENCES
from ovmstrio.models.sequences.requests import (
    decode_arrays,
    decode_outputs,
    encode_arrays,
    encode_outputs,
    owner_index,
)
from ovmstrio.workers.rpc import PeerUnreachable
from ovmstrio.workers.shared_state import SharedCounterRow, counter_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ovmstrio.core.errors import ServerError
    from ovmstrio.core.worker_peers import ExportedEngine
    from ovmstrio.serving.registry import Registry
    from ovmstrio.workers.rpc import WorkerRpc
    from ovmstrio.workers.shared_state import SharedState

_REPLACEMENT_SECONDS: Final = 600.0
"""Time that a call waits for a worker that a rolling restart replaces."""


class OwnerTimeouts:
    """Time limits of calls that wait for a restarting worker.

    Args:
        seconds: limit after a crash; in a rolling restart a call waits for the successor.
    """

    def __init__(self, state: SharedState, seconds: float) -> None:
        self._state = state
        self._seconds = seconds

    def seconds(self, row: int) -> float:
        """Return the limit for a call that starts now."""
        return _REPLACEMENT_SECONDS if self._state.replaced == row else self._seconds


# Sequences

_PLAIN_STEP: Final = "plain step"
_PACKED_STEP: Final = "packed step"
_PLAIN: Final = 2
"""Length of a result that is not packed."""


class WorkerSequences:
    """Sequences of all workers; see :class:`ovmstrio.core.worker_peers.SequenceOwners`.

    Args:
        rpc: RPC of sequence steps only, which a worker takes once it has restored its sequences and loaded its models.
    """

    def __init__(self, rpc: WorkerRpc, state: SharedState, wait: OwnerTimeouts) -> None:
        self._rpc = rpc
        self._state = state
        self._wait = wait
        self._counts: Counter[tuple[str, int]] = Counter()
        self._rows: dict[tuple[str, int], SharedCounterRow] = {}

    @property
    def last_id(self) -> int:
        """Last generated id of this worker or a predecessor."""
        return self._state.last_id(self._rpc.row)

    @last_id.setter
    def last_id(self, number: int) -> None:
        self._state.set_last_id(self._rpc.row, number)

    def owner(self, model: str, identity: int | str) -> int | None:
        """Return the worker that owns an id; None if this worker does."""
        row = owner_index(f"{model}\0{identity}", self._rpc.rows)
        return None if row == self._rpc.row else row

    def begin(self, model: str, version: int, limit: float) -> None:
        """Count a sequence; raises TooManySequences if the version has ``limit`` in all workers."""
        with self._state.locked():
            row = self._row(model, version)
            alive = self._counts[model, version]
            if limit < math.inf and alive + row.elsewhere().in_flight >= limit:
                raise TooManySequences(TOO_MANY_SEQUENCES)
            self._counts[model, version] = alive + 1
            row.write(alive + 1)

    def end(self, model: str, version: int) -> None:
        """Count the end of a sequence."""
        with self._state.locked():
            self._counts[model, version] -= 1
            self._row(model, version).write(self._counts[model, version])

    def count(self, model: str, version: int) -> int:
        """Return the number of sequences of a version in all workers."""
        with self._state.locked():
            return self._counts[model, version] + self._row(model, version).elsewhere().in_flight

    def _row(self, model: str, version: int) -> SharedCounterRow:
        """Return the counter row of a version; requires the lock."""
        known = self._rows.get((model, version))
        if known is None:
            key = counter_key(f"sequences {model}/{version}")
            known = self._rows[model, version] = SharedCounterRow(self._state.counters, key, self._rpc.row)
        # Refreshes the position: the row may have been reassigned while unused.
        _ = known.in_flight
        return known

    async def run_step(self, owner: int, step: ForwardedStep) -> StepResult:
        """Run a request on another worker; see :class:`ovmstrio.core.worker_peers.SequenceOwners`."""
        sequence = [step.model, step.version, step.id, step.start, step.end]
        seconds = self._wait.seconds(owner)
        packed = encode_arrays((name, "", array) for name, array in step.arrays.items())
        if packed is None:
            plain = [_PLAIN_STEP, *sequence, dict(step.arrays), step.max_output_bytes]
            outputs, steps = await self._rpc.call(owner, plain, wait_seconds=seconds)
            return StepResult(decode_outputs(outputs), steps)
        heads, buffers = packed
        most = step.max_output_bytes if math.isfinite(step.max_output_bytes) else None
        call = PackedMessage([_PACKED_STEP, *sequence, most, heads], buffers)
        result = await self._rpc.call(owner, call, wait_seconds=seconds)
        if len(result) == _PLAIN:
            return StepResult(decode_outputs(result[0]), result[1])
        steps, *packed_outputs = result
        arrays = decode_arrays(*packed_outputs)
        return StepResult([Tensor(name, BY_NAME[datatype], array) for name, datatype, array in arrays], steps)


async def answer_step(registry: Registry, call: Sequence[Any]) -> Any:
    """Run a request that another worker has forwarded; raises ServerError as the model.

    Does not wait before the request is in its sequence's queue, so the owner keeps the order of the calls.
    """
    method, *sequence = call
    if method == _PLAIN_STEP:
        outputs, steps = await _run_step(registry, ForwardedStep(*sequence))
        return [encode_outputs(outputs), steps]
    model, version, identity, start, end, most, heads, tail = sequence
    arrays = {name: array for name, _, array in decode_arrays(heads, tail)}
    most = math.inf if most is None else most
    outputs, steps = await _run_step(registry, ForwardedStep(model, version, identity, start, end, arrays, most))
    packed = encode_arrays((each.name, each.datatype_name, each.array) for each in outputs if isinstance(each, Tensor))
    return [encode_outputs(outputs), steps] if packed is None else PackedMessage([steps, packed[0]], packed[1])


async def _run_step(registry: Registry, step: ForwardedStep) -> StepResult:
    # Imported late: OpenVINO is only imported with models.
    from ovmstrio.models.stateful import StatefulServable  # noqa: PLC0415 - for who has some only

    with registry.lease_now(step.model, step.version) or await registry.lease(step.model, step.version) as lease:
        servable: Any = lease.servable
        if not isinstance(servable, StatefulServable):
            raise NotSupported(f"{step.model!r} is not a stateful model")
        return await servable.run_step(step)


# Text engines

CALL_ENGINE: Final = "call engine"
LISTEN_ENGINE: Final = "listen to engine"
"""RPC names."""
_LOAD_WAIT_SECONDS: Final = 60.0
"""Time that a call waits for an engine to be loaded here, before another engine of the model is used."""
_POLL_SECONDS: Final = 1.0


class WorkerEngines:
    """Engines of all workers; see :class:`ovmstrio.core.worker_peers.EngineDirectory`."""

    def __init__(self, rpc: WorkerRpc, wait: OwnerTimeouts) -> None:
        self.row = rpc.row
        self.rows = rpc.rows
        self.wait_seconds = wait.seconds
        self._rpc = rpc
        self._exported: dict[str, ExportedEngine] = {}
        self._errors: dict[str, tuple[str, ServerError]] = {}
        self._substitutes: dict[tuple[int, str], str] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def owner(self, name: str) -> int | None:
        """Return the worker that owns a model's engine; None if this worker does."""
        row = owner_index(name, self.rows)
        return None if row == self.row else row

    @contextmanager
    def exported(self, key: str, engine: ExportedEngine) -> Iterator[None]:
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

    def set_load_error(self, key: str, error: ServerError) -> None:
        """Set the error for calls of a missing engine."""
        self._errors[_model_of(key)] = key, error
        self._changed.unpark_all()

    async def leave(self, seconds: float) -> None:
        """Stop the engines for other workers, which wait for this worker's successor."""
        async with trio.open_nursery() as nursery:
            for engine in self._exported.values():
                nursery.start_soon(engine.leave, seconds)

    async def call(self, owner: int, key: str, value: Any) -> Any:
        """Call another worker's engine; raises WorkerRestarting if the call was not sent."""
        try:
            return await self._rpc.call(owner, [CALL_ENGINE, key, self.row, value])
        except PeerUnreachable as error:
            raise WorkerRestarting(error.message) from None

    async def listen(self, owner: int, key: str, on_message: Callable[[Any], None]) -> None:
        """Receive the output of another worker's engine."""
        await self._rpc.listen(owner, [LISTEN_ENGINE, key, self.row], on_message)

    async def wait_change(self) -> None:
        """Wait until another worker has started or exited, for at most a second."""
        with trio.move_on_after(_POLL_SECONDS):
            await self._rpc.wait_change()

    async def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Handle an RPC; raises NotReady if there is no such engine, and ServerError as the engine."""
        key, row, *value = arguments
        if method == LISTEN_ENGINE:
            with trio.move_on_after(_LOAD_WAIT_SECONDS):
                while key not in self._exported:
                    refused, error = self._errors.get(_model_of(key), (None, None))
                    if refused == key and error is not None:
                        raise error
                    await self._changed.park()
            return await self._choose(row, key).listen(row)
        return await self._find(self._substitutes.get((row, key), key)).call(row, *value)

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
