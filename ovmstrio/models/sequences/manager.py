"""The sequences of one version of a stateful model.

::

    request ── admit ──> wait for its turn ──> look again ──> run ──> turn over
               │ no checkpoint: ids, capacity and the mark of the last request are settled here
               └ refused at once

Differences from OVMS are improvements.  A request that fails or is cancelled leaves no trace: a start creates nothing,
an end leaves the sequence alive, a step leaves what was remembered before.  Nobody waits for a sequence that is not his
own.  An id that was handed out is not handed out again until all others have been, so that a late request of an ended
sequence meets no stranger's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.errors import SequenceEnding, SequenceExists, SequenceMissing, TooManySequences
from ovmstrio.models.sequences.sequence import Sequence

if TYPE_CHECKING:
    from ovmstrio.models.sequences.requests import Control
    from ovmstrio.tensor import TensorSpec

__all__ = ["SequenceManager"]

_MISSING: Final = "Sequence with provided ID does not exist"
_EXISTS: Final = "Sequence with provided ID already exists"
_ENDING: Final = "Sequence last request is being processed and it's not available anymore"
_TOO_MANY: Final = "Max sequence number has been reached. Could not create new sequence."

_IDS: Final = 2**64


class SequenceManager:
    """Live sequences by id.

    Args:
        name: the model.
        version: its version.
        variables: what the model remembers; states fit only models whose variables are the same.

    Attributes:
        relatives: gives the managers of other versions, from which sequences that follow the default version are
            taken over when they are asked for here.
        capacity: how many sequences may be alive.
        cleaned: whether idle sequences are removed.
        migrates: whether sequences may go on in another version or instance.
        next_id: the id that is tried first for the next sequence that brings none.
        servables: how many loaded instances of the version use it.
    """

    def __init__(self, name: str, version: int, variables: tuple[TensorSpec, ...]) -> None:
        self.name = name
        self.version = version
        self.variables = variables
        self.relatives: Callable[[], Iterable[SequenceManager]] = tuple
        self.capacity = 500
        self.cleaned = True
        self.migrates = True
        self.next_id = 1
        self.servables = 0
        self._sequences: dict[int, Sequence] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Give the sequences; they may end meanwhile."""
        return iter(tuple(self._sequences.values()))

    @asynccontextmanager
    async def turn(self, control: Control, *, by_default: bool = True) -> AsyncIterator[Sequence]:
        """Give the sequence that a request is for, when it is the request's turn, for as long as the block lasts.

        An error or cancellation in the block leaves no trace of the request.

        Args:
            control: what the request says of its sequence.
            by_default: whether the request is for the default version of the model.

        Raises:
            SequenceMissing: there is no such sequence, or its last request has come already.
            SequenceExists: it is to be started, and its id is taken.
            SequenceEnding: it is to be started, and its id is not free yet.
            TooManySequences: there is no room for another one.

        Cancellation: while waiting for the turn.
        """
        if control.start:
            sequence = self._start(control.id, by_default=by_default)
        else:
            sequence = self._find(control.id, by_default=by_default)
        sequence.ending = control.end
        done = False
        try:
            await _take(sequence.turn)
            try:
                if not sequence.alive:
                    raise SequenceMissing(_MISSING)
                yield sequence
                done = True
            finally:
                if control.end if done else control.start:
                    sequence.owner.remove(sequence)
                sequence.turn.release()
        finally:
            if control.end:
                sequence.ending = done

    def _start(self, number: int, *, by_default: bool) -> Sequence:
        if len(self._sequences) >= self.capacity:
            raise TooManySequences(_TOO_MANY)
        if not number:
            number = self._free_id()
        taken = self._look_up(number, by_default=by_default)
        if taken is not None:
            raise SequenceEnding(_ENDING) if taken.ending else SequenceExists(_EXISTS)
        sequence = Sequence(number, self, by_default=by_default)
        self._sequences[number] = sequence
        return sequence

    def _free_id(self) -> int:
        relatives = tuple(self.relatives())
        number = self.next_id
        while not number or any(number in manager for manager in (self, *relatives)):
            number = (number + 1) % _IDS
        self.next_id = (number + 1) % _IDS
        return number

    def _find(self, number: int, *, by_default: bool) -> Sequence:
        sequence = self._look_up(number, by_default=by_default)
        if sequence is None or sequence.ending:
            raise SequenceMissing(_MISSING)
        return sequence

    def _look_up(self, number: int, *, by_default: bool) -> Sequence | None:
        found = self._sequences.get(number)
        if found is None and by_default:
            for other in self.relatives():
                candidate = other._sequences.get(number)  # noqa: SLF001 - another one of this class
                if candidate is not None and candidate.by_default:
                    self.take(candidate)
                    return candidate
        return found

    def take(self, sequence: Sequence) -> None:
        """Take a sequence over from whichever manager has it; requests that run or wait for it go on."""
        sequence.owner._sequences.pop(sequence.id, None)  # noqa: SLF001 - another one of this class
        sequence.owner = self
        self._sequences[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """End a sequence; its id is free."""
        if sequence.alive:
            sequence.alive = False
            del self._sequences[sequence.id]

    def remove_idle(self) -> int:
        """End the sequences that were idle at the last scan already, and mark those that are now; count the ended.

        A sequence that a request has or waits for is passed over.
        """
        removed = 0
        for sequence in self:
            if sequence.turn.locked():
                continue
            if sequence.idle:
                self.remove(sequence)
                removed += 1
            sequence.idle = True
        return removed


async def _take(turn: trio.StrictFIFOLock) -> None:
    """Acquire a lock; without a checkpoint if it is free."""
    try:
        turn.acquire_nowait()
    except trio.WouldBlock:
        await turn.acquire()
