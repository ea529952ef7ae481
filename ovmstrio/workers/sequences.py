"""Which process of a server has which sequence, as one of them knows it."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import NotSupported, TooManySequences
from ovmstrio.core.tensor import BY_NAME, Tensor
from ovmstrio.core.worker_peers import ForwardedStep, SequenceElsewhere
from ovmstrio.isolation.channel import Swift
from ovmstrio.models.sequences.requests import pack, read_outputs, tell_outputs, unpack
from ovmstrio.util.truncation import utf8
from ovmstrio.workers.rpc import NotBegun
from ovmstrio.workers.shared_state import SharedAccount, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.core.tensor import RawTensor
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.registry import Registry
    from ovmstrio.workers.rpc import Peers
    from ovmstrio.workers.shared_state import Board

__all__ = ["STEP", "SWIFT_STEP", "BoardDirectory", "PeerOwners", "answer_step", "answer_swift_step"]

# ----------------------------------------------------------------------
# Which process of a server has which sequence, as one of them knows it
# ----------------------------------------------------------------------

_KEY_BYTES: Final = 6
_TOO_MANY: Final = "Max sequence number has been reached. Could not create new sequence."
_NO_ROOM: Final = (
    "no sequence can be found any more where another one is begun: max_sequence_number was raised much since the server"
    " was started; start it again"
)


class BoardDirectory:
    """The sequences of all processes, on the board that they share; see ``SequenceDirectory``.

    Two ids that come to the same key have one owner, which does no harm: it knows its sequences by their ids.

    Args:
        board: has the memory, and its lock.
        row: this process's.
        secret: what all processes have, and nobody else: nobody can choose ids that come to keys of his choice.
        settled: is called when all is noted that this process has from its predecessor.
    """

    def __init__(self, board: Board, row: int, secret: str, settled: Callable[[], None] = lambda: None) -> None:
        self._board = board
        self._row = row
        self._digest = blake2b(key=secret.encode()[: blake2b.MAX_KEY_SIZE], digest_size=_KEY_BYTES)
        self._settled = settled
        self._held: Counter[int] = Counter()
        self._alive: Counter[tuple[str, int]] = Counter()
        self._accounts: dict[tuple[str, int], SharedAccount] = {}

    def _key(self, model: str, identity: int | str) -> int:
        digest = self._digest.copy()
        digest.update(utf8(f"{identity}\0{model}"))
        return int.from_bytes(digest.digest(), "little")

    def find(self, model: str, identity: int | str) -> int | None:
        """Tell which process has an id, this one or another; None if nobody has."""
        return self._board.sequences.find(self._key(model, identity))

    def begin(self, model: str, version: int, identity: int | str, most: float) -> None:
        """Note that this process has a sequence, unless another one has its id, or there are ``most`` of the version.

        Raises:
            SequenceElsewhere: another process has the id.
            TooManySequences: there are as many as may be, in all processes together; or nobody would find it.
        """
        key = self._key(model, identity)
        with self._board.locked():
            found = self._board.sequences.find(key)
            if found not in {None, self._row}:
                raise SequenceElsewhere
            account = self._account(model, version)
            alive = self._alive[model, version]
            if most < math.inf and alive + account.elsewhere().under_way >= most:
                raise TooManySequences(_TOO_MANY)
            if found is None and not self._board.sequences.put(key, self._row):
                raise TooManySequences(_NO_ROOM)
            self._held[key] += 1
            self._alive[model, version] = alive + 1
            account.write(alive + 1)

    def end(self, model: str, version: int, identity: int | str) -> None:
        """Note that a sequence of this process is over."""
        key = self._key(model, identity)
        with self._board.locked():
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._board.sequences.remove(key)
            self._alive[model, version] -= 1
            self._account(model, version).write(self._alive[model, version])

    def count(self, model: str, version: int) -> int:
        """Count the sequences of a version in all processes."""
        with self._board.locked():
            return self._alive[model, version] + self._account(model, version).elsewhere().under_way

    def next_id(self, least: int) -> int:
        """Give a number, not below ``least``, that no process has been given before."""
        with self._board.locked():
            return self._board.sequences.next_id(least)

    def settle(self, next_id: int) -> None:
        """Say that all is noted that this process has from its predecessor; what else that had is over."""
        with self._board.locked():
            self._board.sequences.skip_ids(next_id)
            for key in self._board.sequences.keys(self._row):
                if key not in self._held:
                    self._board.sequences.remove(key)
        self._settled()

    def _account(self, model: str, version: int) -> SharedAccount:
        """Give where processes count the sequences of a version; under the lock."""
        known = self._accounts.get((model, version))
        if known is None:
            name = f"sequences {model}/{version}"
            known = self._accounts[model, version] = SharedAccount(self._board.ledger, key_of(name), self._row)
        # It may have had another place while there were none.
        _ = known.under_way
        return known


# ----------------------------------------------------------------------
# Requests of sequences that have come to one process, and whose sequence another one has
# ----------------------------------------------------------------------

_LOAD_SECONDS: Final = 20.0
"""How long a step waits for a process that has begun to load; with what a lease waits, that is as long as others wait
for one that is being started."""
STEP: Final = "step"
"""What a process asks that has got such a request."""
SWIFT_STEP: Final = "swift step"
"""The same, where its arrays are packed."""
_PACKED: Final = 2


class PeerOwners:
    """The processes of a server as owners of sequences; see ``SequenceOwners``.

    Args:
        peers: the other processes.
        directory: knows which of them has which sequence.
    """

    def __init__(self, peers: Peers, directory: BoardDirectory) -> None:
        self._peers = peers
        self._directory = directory
        # What is under way goes before what comes behind it, wherever its sequence will be then.
        self._ways: dict[tuple[str, int | str], _Way] = {}

    def owner(self, model: str, identity: int | str) -> int | None:
        """Tell which other process has an id; None if it is this one, or nobody."""
        way = self._ways.get((model, identity))
        if way is not None:
            return way.owner
        row = self._directory.find(model, identity)
        return None if row == self._peers.row else row

    async def run_step(self, owner: int, step: ForwardedStep) -> list[Tensor | RawTensor]:
        """Have another process answer a request.

        Raises:
            SequenceElsewhere: it could not be reached, and has the sequence no more.
            ServerError: what it raised there, or it cannot be reached.

        Cancellation: at once, and there, too.
        """
        sequence = step.model, step.id
        way = self._ways.setdefault(sequence, _Way(owner))
        way.count += 1
        try:
            return await self._ask(owner, step)
        except NotBegun:
            self._leave(sequence, way)
            raise SequenceElsewhere from None
        finally:
            way.count -= 1
            if not way.count:
                self._leave(sequence, way)

    def _leave(self, sequence: tuple[str, int | str], way: _Way) -> None:
        if self._ways.get(sequence) is way:
            del self._ways[sequence]

    async def _ask(self, owner: int, step: ForwardedStep) -> list[Tensor | RawTensor]:
        """Ask a process for the answer.

        Raises:
            NotBegun: it could not be reached, and has the sequence no more.
            ServerError: what it raised there, or it cannot be reached.
        """

        def has_it() -> bool:
            return self._directory.find(step.model, step.id) == owner

        sequence = [step.id, step.start, step.end]
        order = [step.model, step.id]
        packed = pack((name, "", array) for name, array in step.arrays.items())
        if packed is None:
            asked = [STEP, step.model, step.version, *sequence, dict(step.arrays), step.most_bytes]
            return read_outputs(await self._peers.ask(owner, asked, order, has_it))
        heads, buffers = packed
        most = step.most_bytes if math.isfinite(step.most_bytes) else None
        told = await self._peers.ask(
            owner, Swift([SWIFT_STEP, step.model, step.version, *sequence, most, heads], buffers), order, has_it
        )
        if len(told) == _PACKED:
            return [Tensor(name, BY_NAME[datatype], array) for name, datatype, array in unpack(*told)]
        return read_outputs(told[0])


class _Way:
    """Where requests of a sequence are that are under way, and how many they are."""

    __slots__ = ("count", "owner")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.count = 0


async def answer_swift_step(registry: Registry, arguments: Sequence[Any]) -> Swift | list[Any]:
    """Answer a request of a sequence that this process has, whose arrays are packed.

    Raises:
        ServerError: as the model.

    Cancellation: as the model.
    """
    model, version, identity, start, end, most, heads, tail = arguments
    arrays = {name: array for name, _, array in unpack(heads, tail)}
    most = math.inf if most is None else most
    outputs = await _run(registry, ForwardedStep(model, version, identity, start, end, arrays, most))
    packed = pack((each.name, each.datatype_name, each.array) for each in outputs if isinstance(each, Tensor))
    return [tell_outputs(outputs)] if packed is None else Swift([packed[0]], packed[1])


async def answer_step(registry: Registry, arguments: Sequence[Any]) -> Any:
    """Answer a request of a sequence that this process has.

    Raises:
        ServerError: as the model.

    Cancellation: as the model.
    """
    return tell_outputs(await _run(registry, ForwardedStep(*arguments)))


async def _run(registry: Registry, step: ForwardedStep) -> list[Tensor | RawTensor]:
    # OpenVINO is left alone by those who have no models.
    from ovmstrio.models.stateful import StatefulServable  # noqa: PLC0415 - for who has some only

    with await _lease(registry, step.model, step.version) as lease:
        servable: Any = lease.servable
        if not isinstance(servable, StatefulServable):
            raise NotSupported(f"{step.model!r} has no sequences: it is not a stateful model")
        return await servable.run_step(step)


async def _lease(registry: Registry, name: str, version: str) -> Lease:
    """Take a lease of a model, which this process may not have loaded yet; whoever asks has.

    Raises:
        ServerError: as the registry.

    Cancellation: at once.
    """
    leased = registry.lease_now(name, version)
    if leased is not None:
        return leased
    if not registry.has_loaded:
        with trio.move_on_after(_LOAD_SECONDS):
            await registry.wait_loaded()
    return await registry.lease(name, version)
