"""Sequences of all workers: owner directory, and forwarding of requests to the owner."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import NotSupported, TooManySequences
from ovmstrio.core.tensor import BY_NAME, Tensor
from ovmstrio.core.worker_peers import ForwardedStep, SequenceMoved
from ovmstrio.isolation.messages import PackedMessage
from ovmstrio.models.sequences.requests import decode_arrays, decode_outputs, encode_arrays, encode_outputs
from ovmstrio.util.truncation import utf8
from ovmstrio.workers.rpc import PeerUnreachable
from ovmstrio.workers.shared_state import SharedCounterRow, counter_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.core.tensor import RawTensor
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.registry import Registry
    from ovmstrio.workers.rpc import WorkerRpc
    from ovmstrio.workers.shared_state import SharedState

# Directory

_KEY_BYTES: Final = 6
_TOO_MANY: Final = "Max sequence number has been reached. Could not create new sequence."
_NO_ROOM: Final = (
    "the sequence table is full: max_sequence_number was raised considerably since the server"
    " was started; restart the server"
)


class SharedSequenceDirectory:
    """Owners of sequences in shared memory; see ``SequenceDirectory``.

    Ids with the same key have one owner, which is harmless: each worker knows its sequences by id.

    Args:
        secret: shared by the workers; clients cannot construct key collisions.
        settled: is called when the sequences of this worker's predecessor are registered.
    """

    def __init__(self, board: SharedState, row: int, secret: str, settled: Callable[[], None] = lambda: None) -> None:
        self._board = board
        self._row = row
        self._digest = blake2b(key=secret.encode()[: blake2b.MAX_KEY_SIZE], digest_size=_KEY_BYTES)
        self._on_settled = settled
        self._key_counts: Counter[int] = Counter()
        self._sequence_counts: Counter[tuple[str, int]] = Counter()
        self._counters_by_version: dict[tuple[str, int], SharedCounterRow] = {}

    def _key(self, model: str, identity: int | str) -> int:
        digest = self._digest.copy()
        digest.update(utf8(f"{identity}\0{model}"))
        return int.from_bytes(digest.digest(), "little")

    def find(self, model: str, identity: int | str) -> int | None:
        """Return the worker that owns an id, or None."""
        return self._board.sequences.find(self._key(model, identity))

    def begin(self, model: str, version: int, identity: int | str, most: float) -> None:
        """Register a sequence of this worker.

        Raises:
            SequenceElsewhere: another worker owns the id.
            TooManySequences: the version has ``most`` sequences in all workers, or the owner table is full.
        """
        key = self._key(model, identity)
        with self._board.locked():
            found = self._board.sequences.find(key)
            if found not in {None, self._row}:
                raise SequenceMoved
            account = self._counters(model, version)
            alive = self._sequence_counts[model, version]
            if most < math.inf and alive + account.elsewhere().under_way >= most:
                raise TooManySequences(_TOO_MANY)
            if found is None and not self._board.sequences.put(key, self._row):
                raise TooManySequences(_NO_ROOM)
            self._key_counts[key] += 1
            self._sequence_counts[model, version] = alive + 1
            account.write(alive + 1)

    def end(self, model: str, version: int, identity: int | str) -> None:
        """Unregister a sequence of this worker."""
        key = self._key(model, identity)
        with self._board.locked():
            self._key_counts[key] -= 1
            if not self._key_counts[key]:
                del self._key_counts[key]
                self._board.sequences.remove(key)
            self._sequence_counts[model, version] -= 1
            self._counters(model, version).write(self._sequence_counts[model, version])

    def count(self, model: str, version: int) -> int:
        """Return the number of sequences of a version in all workers."""
        with self._board.locked():
            return self._sequence_counts[model, version] + self._counters(model, version).elsewhere().under_way

    def next_id(self, least: int) -> int:
        """Return an unused id, at least ``least``."""
        with self._board.locked():
            return self._board.sequences.next_id(least)

    def settle(self, next_id: int) -> None:
        """Drop entries of this worker's predecessor that were not registered again."""
        with self._board.locked():
            self._board.sequences.skip_ids(next_id)
            for key in self._board.sequences.keys(self._row):
                if key not in self._key_counts:
                    self._board.sequences.remove(key)
        self._on_settled()

    def _counters(self, model: str, version: int) -> SharedCounterRow:
        """Return the counter row of a version; requires the lock."""
        known = self._counters_by_version.get((model, version))
        if known is None:
            name = f"sequences {model}/{version}"
            known = self._counters_by_version[model, version] = SharedCounterRow(
                self._board.ledger, counter_key(name), self._row
            )
        # Refreshes the position: the row may have been reassigned while unused.
        _ = known.under_way
        return known


# Forwarding

_LOAD_SECONDS: Final = 20.0
"""Time that a request waits for a loading worker; with the lease timeout equal to that for a starting worker."""
STEP: Final = "step"
"""RPC that forwards a request."""
PACKED_STEP: Final = "swift step"
"""The same with packed arrays."""
_PACKED: Final = 2


class SequenceForwarder:
    """Forwarding of sequence requests to their owners; see ``SequenceOwners``."""

    def __init__(self, peers: WorkerRpc, directory: SharedSequenceDirectory) -> None:
        self._peers = peers
        self._directory = directory
        # Running requests precede later ones, even if the sequence moves.
        self._routes: dict[tuple[str, int | str], _Route] = {}

    def owner(self, model: str, identity: int | str) -> int | None:
        """Return the worker that owns an id; None if this worker or none does."""
        route = self._routes.get((model, identity))
        if route is not None:
            return route.owner
        row = self._directory.find(model, identity)
        return None if row == self._peers.row else row

    async def run_step(self, owner: int, step: ForwardedStep) -> list[Tensor | RawTensor]:
        """Run a request on another worker.

        Raises:
            SequenceElsewhere: the worker cannot be reached, and does not own the sequence any more.
            ServerError: the request failed there, or the worker cannot be reached.
        """
        sequence = step.model, step.id
        route = self._routes.setdefault(sequence, _Route(owner))
        route.count += 1
        try:
            return await self._call_owner(owner, step)
        except PeerUnreachable:
            self._remove_route(sequence, route)
            raise SequenceMoved from None
        finally:
            route.count -= 1
            if not route.count:
                self._remove_route(sequence, route)

    def _remove_route(self, sequence: tuple[str, int | str], route: _Route) -> None:
        if self._routes.get(sequence) is route:
            del self._routes[sequence]

    async def _call_owner(self, owner: int, step: ForwardedStep) -> list[Tensor | RawTensor]:
        def has_it() -> bool:
            return self._directory.find(step.model, step.id) == owner

        sequence = [step.id, step.start, step.end]
        order = [step.model, step.id]
        packed = encode_arrays((name, "", array) for name, array in step.arrays.items())
        if packed is None:
            call = [STEP, step.model, step.version, *sequence, dict(step.arrays), step.most_bytes]
            return decode_outputs(await self._peers.ask(owner, call, order, has_it))
        heads, buffers = packed
        most = step.most_bytes if math.isfinite(step.most_bytes) else None
        result = await self._peers.ask(
            owner,
            PackedMessage([PACKED_STEP, step.model, step.version, *sequence, most, heads], buffers),
            order,
            has_it,
        )
        if len(result) == _PACKED:
            return [Tensor(name, BY_NAME[datatype], array) for name, datatype, array in decode_arrays(*result)]
        return decode_outputs(result[0])


class _Route:
    """In-flight requests of a forwarded sequence."""

    __slots__ = ("count", "owner")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.count = 0


async def run_packed_step(registry: Registry, arguments: Sequence[Any]) -> PackedMessage | list[Any]:
    """Run a forwarded request with packed arrays; raises ServerError as the model."""
    model, version, identity, start, end, most, heads, tail = arguments
    arrays = {name: array for name, _, array in decode_arrays(heads, tail)}
    most = math.inf if most is None else most
    outputs = await _run(registry, ForwardedStep(model, version, identity, start, end, arrays, most))
    packed = encode_arrays((each.name, each.datatype_name, each.array) for each in outputs if isinstance(each, Tensor))
    return [encode_outputs(outputs)] if packed is None else PackedMessage([packed[0]], packed[1])


async def run_plain_step(registry: Registry, arguments: Sequence[Any]) -> Any:
    """Run a forwarded request; raises ServerError as the model."""
    return encode_outputs(await _run(registry, ForwardedStep(*arguments)))


async def _run(registry: Registry, step: ForwardedStep) -> list[Tensor | RawTensor]:
    # Imported late: OpenVINO is only imported with models.
    from ovmstrio.models.stateful import StatefulServable  # noqa: PLC0415 - for who has some only

    with await _lease(registry, step.model, step.version) as lease:
        servable: Any = lease.servable
        if not isinstance(servable, StatefulServable):
            raise NotSupported(f"{step.model!r} is not a stateful model")
        return await servable.run_step(step)


async def _lease(registry: Registry, name: str, version: str) -> Lease:
    """Lease a model; waits if this worker has not loaded it yet."""
    leased = registry.lease_now(name, version)
    if leased is not None:
        return leased
    if not registry.has_loaded:
        with trio.move_on_after(_LOAD_SECONDS):
            await registry.wait_loaded()
    return await registry.lease(name, version)
