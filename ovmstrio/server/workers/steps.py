"""Requests of sequences that have come to one process, and whose sequence another one has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.sequence_owners import ForwardedStep, SequenceElsewhere
from ovmstrio.core.tensor import Tensor
from ovmstrio.runtimes.models.sequences.owners import pack, read_outputs, tell_outputs, unpack
from ovmstrio.server.workers.links import NotBegun
from ovmstrio.work.messages.message_packets import Swift

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.tensor import RawTensor
    from ovmstrio.registry import Registry
    from ovmstrio.registry.instances import Lease
    from ovmstrio.server.workers.peers import Peers
    from ovmstrio.server.workers.sequence_directory import BoardDirectory

__all__ = ["STEP", "SWIFT_STEP", "PeerOwners", "answer_step", "answer_swift_step"]

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
    from ovmstrio.runtimes.models.stateful import StatefulServable  # noqa: PLC0415 - for who has some only

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
