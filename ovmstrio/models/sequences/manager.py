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

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import SequenceEnding, SequenceExists, SequenceMissing, TooManySequences
from ovmstrio.core.service import SequenceInfo
from ovmstrio.core.worker_peers import SequenceElsewhere

if TYPE_CHECKING:
    from ovmstrio.config.specs import ModelSpec
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.core.worker_peers import SequenceDirectory
    from ovmstrio.inference.tensors import State
    from ovmstrio.models.sequences.requests import Control

__all__ = [
    "EXISTS",
    "Sequence",
    "SequenceChanges",
    "SequenceManager",
    "SequenceManagers",
    "Turn",
    "clean_sequences",
    "scan",
]

# ----------------------------------------------------------------------
# The sequences of one version of a stateful model
# ----------------------------------------------------------------------

_MISSING: Final = "Sequence with provided ID does not exist"
EXISTS: Final = "Sequence with provided ID already exists"
"""What is said where an id is taken."""
_ENDING: Final = "Sequence last request is being processed and it's not available anymore"
_TOO_MANY: Final = "Max sequence number has been reached. Could not create new sequence."

_IDS: Final = 2**64


class SequenceManager:
    """Live sequences by id.

    States fit only models whose ``variables``, which are what the model remembers, are the same.

    Attributes:
        relatives: gives the managers of other versions, from which sequences that follow the default version are
            taken over when they are asked for here.
        directory: knows the sequences of all processes of the server; None where there is one.
        capacity: how many sequences may be alive, in all processes together.
        cleaned: whether idle sequences are removed.
        migrates: whether sequences may go on in another version or instance.
        next_id: the id that is tried first for the next sequence that brings none; the same in all relatives.
        servables: how many loaded instances of the version use it.
        changes: notes what becomes of sequences, for a store; None where there is none.
    """

    def __init__(self, name: str, version: int, variables: tuple[TensorSpec, ...]) -> None:
        self.name = name
        self.version = version
        self.variables = variables
        self.relatives: Callable[[], Iterable[SequenceManager]] = tuple
        self.directory: SequenceDirectory | None = None
        self.capacity = 500
        self.cleaned = True
        self.migrates = True
        self.next_id = 1
        self.servables = 0
        self.changes: SequenceChanges | None = None
        self._sequences: dict[int | str, Sequence] = {}

    def __contains__(self, number: int | str) -> bool:
        return number in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Give the sequences; they may end meanwhile."""
        return iter(tuple(self._sequences.values()))

    def turn(self, control: Control, *, by_default: bool = True) -> Turn:
        """Give what, entered, gives the sequence that a request is for: see :class:`Turn`."""
        return Turn(self, control, by_default=by_default)

    def admit(self, control: Control, *, by_default: bool) -> Sequence:
        """Find or make the sequence that a request is for, and mark it if that is its last one.

        Raises:
            SequenceMissing: there is no such sequence, or its last request has come already.
            SequenceExists: it is to be started, and its id is taken.
            SequenceEnding: it is to be started, and its id is not free yet.
            TooManySequences: there is no room for another one.
            SequenceElsewhere: it is to be started, and another process has its id.
        """
        if control.start:
            sequence = self._start(control.id, by_default=by_default)
        else:
            found = self._sequences.get(control.id) or self._look_up(control.id, by_default=by_default)
            if found is None or found.ending:
                raise SequenceMissing(_MISSING)
            sequence = found
        sequence.ending = control.end
        return sequence

    def _start(self, number: int | str, *, by_default: bool) -> Sequence:
        if self._count() >= self.capacity:
            raise TooManySequences(_TOO_MANY)
        if not number:
            return self._start_free(by_default=by_default)
        taken = self._taken(number, by_default=by_default)
        if taken is not None:
            raise SequenceEnding(_ENDING) if taken.ending else SequenceExists(EXISTS)
        return self._begin(number, by_default=by_default)

    def _count(self) -> int:
        return len(self._sequences) if self.directory is None else self.directory.count(self.name, self.version)

    def _start_free(self, *, by_default: bool) -> Sequence:
        while True:
            with suppress(SequenceElsewhere):
                return self._begin(self._free_id(), by_default=by_default)

    def _begin(self, number: int | str, *, by_default: bool) -> Sequence:
        if self.directory is not None:
            self.directory.begin(self.name, self.version, number, self.capacity)
        sequence = self._sequences[number] = Sequence(number, self, by_default=by_default)
        return sequence

    def _free_id(self) -> int:
        family = (self, *self.relatives())
        number = self._candidate(self.next_id)
        while not number or any(number in manager for manager in family):
            number = self._candidate((number + 1) % _IDS)
        for manager in family:
            manager.next_id = (number + 1) % _IDS
        return number

    def _candidate(self, least: int) -> int:
        # Each that is passed over is asked for, so that no other process gives what this one ends with.
        return least if self.directory is None else self.directory.next_id(least)

    def _taken(self, number: int | str, *, by_default: bool) -> Sequence | None:
        found = self._look_up(number, by_default=by_default)
        if found is None:
            # What follows the default version is on its way to the newest one, where its id must mean nothing else.
            older = (other for other in self.relatives() if other.version < self.version)
            candidates = (other._sequences.get(number) for other in older)  # noqa: SLF001 - others of this class
            found = next((each for each in candidates if each is not None and each.by_default), None)
        return found

    def _look_up(self, number: int | str, *, by_default: bool) -> Sequence | None:
        found = self._sequences.get(number)
        if found is None and by_default:
            for other in self.relatives():
                candidate = other._sequences.get(number)  # noqa: SLF001 - another one of this class
                if candidate is not None and candidate.by_default:
                    self.take(candidate)
                    return candidate
        return found

    def take(self, sequence: Sequence) -> None:
        """Take a sequence over from whichever manager has it; requests that run or wait for it go on.

        Raises:
            SequenceElsewhere: no manager has it yet, and another process has its id.
        """
        if self.directory is not None:
            # Before the other one leaves it: in between, its id would be anybody's.
            self.directory.begin(self.name, self.version, sequence.id, math.inf)
        sequence.owner._forget(sequence)  # noqa: SLF001 - another one of this class
        sequence.owner = self
        self._sequences[sequence.id] = sequence
        sequence.note()

    def remove(self, sequence: Sequence) -> None:
        """End a sequence; its id is free."""
        if sequence.alive:
            sequence.alive = False
            self._forget(sequence)

    def leave_directory(self) -> None:
        """Say that all sequences are over, but for those whose requests still run."""
        directory, self.directory = self.directory, None
        if directory is not None:
            for number in self._sequences:
                directory.end(self.name, self.version, number)

    def _forget(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.id, None) is not None and self.directory is not None:
            self.directory.end(self.name, self.version, sequence.id)
        if self.changes is not None:
            self.changes.touched[self, sequence.id] = None


class Turn:
    """A request's turn in its sequence, for as long as a block lasts.

    An error or cancellation in the block leaves no trace of the request.

    It is a class because this is done for every request, for which a generator is a good deal slower.
    """

    __slots__ = ("_by_default", "_control", "_manager", "_sequence")

    def __init__(self, manager: SequenceManager, control: Control, *, by_default: bool) -> None:
        self._manager = manager
        self._control = control
        self._by_default = by_default
        self._sequence: Sequence

    async def __aenter__(self) -> Sequence:
        """Wait for the turn.

        Raises:
            SequenceMissing: there is no such sequence, its last request has come already, or its start has failed.
            SequenceExists: it is to be started, and its id is taken.
            SequenceEnding: it is to be started, and its id is not free yet.
            TooManySequences: there is no room for another one.

        Cancellation: while waiting, and only if the turn is another's; the place in the queue is given up.
        """
        sequence = self._sequence = self._manager.admit(self._control, by_default=self._by_default)
        if sequence.is_busy:
            await self._wait(sequence)
        sequence.is_busy = True
        return sequence

    async def _wait(self, sequence: Sequence) -> None:
        admitted = False
        try:
            await sequence.wait_turn()
            admitted = sequence.alive
            if not admitted:
                sequence.end_turn()
                raise SequenceMissing(_MISSING)
        finally:
            if self._control.end:
                sequence.ending = admitted

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Turn over to the next request; has no checkpoint."""
        sequence, control = self._sequence, self._control
        if control.end if kind is None else control.start:
            sequence.owner.remove(sequence)
        elif control.end:
            sequence.ending = False
        sequence.end_turn()


@dataclass(slots=True, eq=False)
class Sequence:
    """A live sequence.

    Attributes:
        id: what requests call it: a number, or a text that only requests choose.
        owner: the manager that has it; another one's after it has moved to another version of the model.
        by_default: whether it was started by a request for the default version, which it follows then.
        is_busy: whether it is the turn of a request; it passes to the next one that waits without a moment in between.
        waiting: the requests whose turn comes later, in the order of their arrival; None before there are any.
        state: what the model remembers; None before the first request has succeeded.
        requests: how many have succeeded.
        alive: False once it is over; a request that waited for its turn meanwhile must not run.
        ending: whether its last request has come.
        idle: whether the cleaner has come by since the last request that succeeded.
        started_at: when it was started, on trio's clock.
        used_at: when its last request succeeded, on trio's clock.
        lost_seconds: of how long, at most, steps are missing because a server ended without a word; see the store.
    """

    id: int | str
    owner: SequenceManager
    by_default: bool = field(kw_only=True)
    is_busy: bool = False
    waiting: trio.lowlevel.ParkingLot | None = None
    state: State | None = None
    requests: int = 0
    alive: bool = True
    ending: bool = False
    idle: bool = False
    started_at: float = field(default_factory=trio.current_time)
    used_at: float = field(default_factory=trio.current_time)
    lost_seconds: float = 0.0

    def advance(self, state: State) -> None:
        """Note that a request has succeeded, and what the model remembers now."""
        self.state = state
        self.requests += 1
        self.idle = False
        self.used_at = trio.current_time()
        if self.owner.changes is not None:
            self.note()

    async def wait_turn(self) -> None:
        """Stand behind the requests that came before.

        Cancellation: at once; the place is given up.
        """
        if self.waiting is None:
            self.waiting = trio.lowlevel.ParkingLot()
        await self.waiting.park()

    def end_turn(self) -> None:
        """Let the next request have its turn."""
        waiting = self.waiting
        self.is_busy = waiting is not None and bool(waiting.unpark())

    def note(self) -> None:
        """Have a store write the sequence down, if there is one."""
        changes = self.owner.changes
        if changes is not None:
            changes.touched[self.owner, self.id] = self

    @property
    def info(self) -> SequenceInfo:
        """The sequence as others see it."""
        now = trio.current_time()
        idle_seconds = now - self.used_at
        return SequenceInfo(self.id, now - self.started_at, idle_seconds, self.requests, self.lost_seconds)


class SequenceChanges:
    """What happened to the sequences of all models since they were last written down; of each only what it came to.

    Noting costs as much for a sequence of a thousand requests as for one of one, and is done in every request.

    Attributes:
        touched: the sequences by manager and id; None for one that the manager has not any more.
        dropped: the models, by name and version, whose manager was given up or replaced, with all that it had.
    """

    __slots__ = ("dropped", "touched")

    def __init__(self) -> None:
        self.touched: dict[tuple[SequenceManager, int | str], Sequence | None] = {}
        self.dropped: set[tuple[str, int]] = set()

    def __bool__(self) -> bool:
        return bool(self.touched or self.dropped)

    def hand_out(self) -> SequenceChanges:
        """Give everything that was noted, and begin anew."""
        out = SequenceChanges()
        out.touched, self.touched = self.touched, out.touched
        out.dropped, self.dropped = self.dropped, out.dropped
        return out


# ----------------------------------------------------------------------
# The managers of every stateful model, which outlive the loaded instances that use them
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)


class SequenceManagers:
    """One manager a version of a stateful model.

    Attributes:
        changes: notes what becomes of sequences, for a store; None where there is none.
        directory: knows the sequences of all processes of the server; None where there is one.
    """

    def __init__(self) -> None:
        self.changes: SequenceChanges | None = None
        self.directory: SequenceDirectory | None = None
        self._managers: dict[tuple[str, int], SequenceManager] = {}

    def __iter__(self) -> Iterator[SequenceManager]:
        return iter(tuple(self._managers.values()))

    def open(self, spec: ModelSpec, version: int, variables: tuple[TensorSpec, ...]) -> SequenceManager:
        """Give the manager for an instance that was loaded, which closes it when it is not used any more.

        Sequences that go on with the variables of the new instance are in it; others are dropped, as all are where the
        model's ``sequence_migration`` is off.
        """
        manager = self._managers.get((spec.name, version))
        if manager is not None and not _goes_on(manager, spec, variables):
            log.warning("sequences dropped", model=spec.name, version=version, sequences=len(manager))
            manager = None
        if manager is None:
            manager = self.add(spec.name, version, variables)
        manager.capacity = spec.max_sequence_number
        manager.cleaned = spec.idle_sequence_cleanup
        manager.migrates = spec.sequence_migration
        # Versions whose sequences may meet hand out ids in turn, those that were restored as well as new ones.
        manager.next_id = max(each.next_id for each in (manager, *self._relatives(manager)))
        manager.servables += 1
        return manager

    def add(self, name: str, version: int, variables: tuple[TensorSpec, ...]) -> SequenceManager:
        """Put a new manager in the place of a version's, for an instance that may be loaded later."""
        manager = SequenceManager(name, version, variables)
        manager.relatives = partial(self._relatives, manager)
        manager.changes = self.changes
        manager.directory = self.directory
        replaced = self._managers.get((name, version))
        if replaced is not None:
            replaced.leave_directory()
        self._managers[name, version] = manager
        self._note_dropped(name, version)
        return manager

    def settle(self) -> None:
        """Say that the sequences of an earlier run are there, and those that are not are over."""
        if self.directory is not None:
            self.directory.settle(max((manager.next_id for manager in self), default=1))

    def hand_over(self) -> None:
        """Say that all sequences go on in the next run, though their models are closed in this one."""
        self.directory = None
        for manager in self:
            manager.directory = None

    def has(self, manager: SequenceManager) -> bool:
        """Tell whether a manager is the one of its version still."""
        return self._managers.get((manager.name, manager.version)) is manager

    def _note_dropped(self, name: str, version: int) -> None:
        if self.changes is not None:
            self.changes.dropped.add((name, version))

    def close(self, manager: SequenceManager) -> None:
        """Say that an instance is closed; with the last one the manager goes, too.

        Sequences that follow the default version go to another loaded version of the model, if there is one for them.
        """
        manager.servables -= 1
        key = (manager.name, manager.version)
        if manager.servables or self._managers.get(key) is not manager:
            return
        del self._managers[key]
        self._note_dropped(*key)
        loaded = (other for other in self._relatives(manager) if other.servables)
        heir = max(loaded, key=lambda other: other.version, default=None)
        if heir is not None:
            for sequence in manager:
                if sequence.by_default and sequence.id not in heir:
                    heir.take(sequence)
        manager.leave_directory()

    def _relatives(self, manager: SequenceManager) -> Iterator[SequenceManager]:
        """Give the managers of other versions whose sequences could go on with this one."""
        for other in self:
            same = other.name == manager.name and other.variables == manager.variables
            if same and other is not manager and other.migrates and manager.migrates:
                yield other


def _goes_on(manager: SequenceManager, spec: ModelSpec, variables: tuple[TensorSpec, ...]) -> bool:
    return manager.variables == variables and (spec.sequence_migration or not manager.servables)


# ----------------------------------------------------------------------
# Removing sequences that nobody goes on with: one task a server looks at all of them from time to time
# ----------------------------------------------------------------------

_MINUTE: Final = 60
_PORTION: Final = 500
"""How many sequences are looked at, or removed, before requests have their turn again: below a millisecond."""


def scan(managers: Iterable[SequenceManager]) -> int:
    """Remove the sequences that no request of theirs has succeeded in since the scan before; count them."""
    return sum(_portions(managers))


def _portions(managers: Iterable[SequenceManager]) -> Iterator[int]:
    """Scan a portion at each step, and count what was removed in it; requests may run in between."""
    # What is there at the beginning is looked at once, whichever manager it moves to meanwhile.
    found = [(manager, list(manager)) for manager in managers if manager.cleaned]
    for manager, sequences in found:
        total = 0
        while sequences:
            removed = sum(map(_is_over, sequences[-_PORTION:]))
            # To let go of all states at once, at the end, would take as long as all the rest.
            del sequences[-_PORTION:]
            total += removed
            yield removed
        if total:
            log.info("idle sequences removed", model=manager.name, version=manager.version, sequences=total)


def _is_over(sequence: Sequence) -> bool:
    """End a sequence that was idle at the last scan already, and mark one that is now; a busy one is passed over."""
    if sequence.is_busy or not sequence.alive:
        return False
    over = sequence.idle
    if over:
        sequence.owner.remove(sequence)
    sequence.idle = True
    return over


async def clean_sequences(managers: Iterable[SequenceManager], minutes: int) -> None:
    """Scan every so many minutes, for ever; with 0 minutes return at once.

    An idle sequence is removed between one and two periods after its last request.

    Cancellation: at any checkpoint; nothing is held.
    """
    while minutes:
        await trio.sleep(minutes * _MINUTE)
        for _ in _portions(managers):
            await trio.lowlevel.checkpoint()
