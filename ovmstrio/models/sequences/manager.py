"""Sequences of stateful models: ids, order of requests, and removal of idle sequences.

::

    request ── admit ──> wait for the turn ──> check again ──> run ──> next turn
               │ no checkpoint: ids, capacity and the mark of the last request are settled here
               └ rejected at once

Differences from OVMS: a request that fails or is cancelled has no effect. A failed start creates no sequence, a failed
end leaves the sequence alive, and a failed step keeps the previous state. Requests wait only for their own sequence.
Generated ids are reused only after all other ids, so that a late request of an ended sequence does not reach another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import SequenceEnding, SequenceExists, SequenceMissing, SequenceRestored, TooManySequences
from ovmstrio.core.service import SequenceInfo

if TYPE_CHECKING:
    from ovmstrio.config.specs import ModelSpec
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.core.worker_peers import SequenceOwners
    from ovmstrio.inference.tensors import State
    from ovmstrio.models.sequences.requests import SequenceControl

_MISSING: Final = "Sequence with provided ID does not exist"
SEQUENCE_EXISTS: Final = "Sequence with provided ID already exists"
"""OVMS's message for an id that is in use."""
_ENDING: Final = "Sequence last request is being processed and it's not available anymore"
TOO_MANY_SEQUENCES: Final = "Max sequence number has been reached. Could not create new sequence."

_IDS: Final = 2**64
_REFUSAL_SECONDS: Final = 0.1
"""Time for steps that a client sent before it learns that its sequence was restored: they are refused as well."""


class SequenceManager:
    """Live sequences of one version of a stateful model, by id.

    States can move only between models with equal ``variables``, the specifications of the states.

    Attributes:
        related_managers: returns managers of other versions; their sequences of the default version move here when
            requested here.
        owners: sequences of all workers of the server; None for a single worker.
        capacity: maximum number of live sequences of all workers.
        removes_idle: whether idle sequences are removed.
        can_migrate: whether sequences may continue in another version or instance.
        next_id: next generated id; the same in all versions.
        servables: number of loaded instances of the version.
        changes: records changes for a sequence store; None without a store.
    """

    def __init__(self, name: str, version: int, variables: tuple[TensorSpec, ...]) -> None:
        self.name = name
        self.version = version
        self.variables = variables
        self.related_managers: Callable[[], Iterable[SequenceManager]] = tuple
        self.owners: SequenceOwners | None = None
        self.capacity = 500
        self.removes_idle = True
        self.can_migrate = True
        self.next_id = 1
        self.servables = 0
        self.changes: SequenceChanges | None = None
        self._sequences: dict[int | str, Sequence] = {}

    def __contains__(self, number: int | str) -> bool:
        return number in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences.values()))

    def turn(self, control: SequenceControl, *, is_default_version: bool = True) -> SequenceTurn:
        """Return a context manager that waits for the request's turn in its sequence."""
        return SequenceTurn(self, control, is_default_version=is_default_version)

    def admit(self, control: SequenceControl, *, is_default_version: bool) -> Sequence:
        """Find or create the sequence of a request, and mark it if this is its last request.

        Raises:
            SequenceMissing: the sequence does not exist or has received its last request.
            SequenceExists: the id of a new sequence is in use.
            SequenceEnding: the id of a new sequence is in use by a sequence that is ending.
            SequenceRestored: the sequence may lack steps, and its client has not been informed.
            TooManySequences: the capacity is reached.
        """
        if control.start:
            sequence = self._start(control.id, is_default_version=is_default_version)
        else:
            found = self._sequences.get(control.id) or self._find(control.id, is_default_version=is_default_version)
            if found is None or found.ending:
                raise SequenceMissing(_MISSING)
            if found.is_refused:
                raise SequenceRestored.of(found.id, found.requests)
            sequence = found
        sequence.ending = control.end
        return sequence

    def accept(self, control: SequenceControl, *, is_default_version: bool) -> None:
        """Accept further steps of a restored sequence, whose client has been informed."""
        found = self._find(control.id, is_default_version=is_default_version)
        if found is not None:
            found.is_refused = False

    def _start(self, number: int | str, *, is_default_version: bool) -> Sequence:
        owners = self.owners
        taken = self._find_conflict(number, is_default_version=is_default_version) if number else None
        if taken is not None and taken.lost_seconds and not taken.is_busy:
            # The client does not continue the restored sequence.
            taken.owner.remove(taken)
            taken = None
        count = len(self._sequences) if owners is None else owners.count(self.name, self.version)
        if count >= self.capacity:
            raise TooManySequences(TOO_MANY_SEQUENCES)
        if not number:
            return self._create(self._free_id(), is_default_version=is_default_version)
        if taken is not None:
            raise SequenceEnding(_ENDING) if taken.ending else SequenceExists(SEQUENCE_EXISTS)
        return self._create(number, is_default_version=is_default_version)

    def _create(self, number: int | str, *, is_default_version: bool) -> Sequence:
        if self.owners is not None:
            self.owners.begin(self.name, self.version, self.capacity)
        sequence = self._sequences[number] = Sequence(number, self, is_default_version=is_default_version)
        return sequence

    def _free_id(self) -> int:
        all_versions = (self, *self.related_managers())
        number = self.next_id if self.owners is None else max(self.next_id, self.owners.last_id + 1)
        while not number or not self._owns(number) or any(number in manager for manager in all_versions):
            number = (number + 1) % _IDS
        for manager in all_versions:
            manager.next_id = (number + 1) % _IDS
        if self.owners is not None:
            self.owners.last_id = number
        return number

    def _owns(self, number: int) -> bool:
        return self.owners is None or self.owners.owner(self.name, number) is None

    def _find_conflict(self, number: int | str, *, is_default_version: bool) -> Sequence | None:
        found = self._find(number, is_default_version=is_default_version)
        if found is None:
            # Sequences that follow the default version will move here, so their ids are taken.
            older = (other for other in self.related_managers() if other.version < self.version)
            candidates = (other._sequences.get(number) for other in older)  # noqa: SLF001 - others of this class
            found = next((each for each in candidates if each is not None and each.is_default_version), None)
        return found

    def _find(self, number: int | str, *, is_default_version: bool) -> Sequence | None:
        found = self._sequences.get(number)
        if found is None and is_default_version:
            for other in self.related_managers():
                candidate = other._sequences.get(number)  # noqa: SLF001 - another one of this class
                if candidate is not None and candidate.is_default_version:
                    self.take(candidate)
                    return candidate
        return found

    def take(self, sequence: Sequence) -> None:
        """Move a sequence here from its manager, with its running and waiting requests."""
        if self.owners is not None:
            self.owners.begin(self.name, self.version, math.inf)
        sequence.owner._forget(sequence)  # noqa: SLF001 - same class
        sequence.owner = self
        self._sequences[sequence.id] = sequence
        sequence.note()

    def remove(self, sequence: Sequence) -> None:
        """End a sequence and free its id."""
        if sequence.alive:
            sequence.alive = False
            self._forget(sequence)

    def stop_counting(self) -> None:
        """Count the end of all sequences in the counts of all workers; running requests continue."""
        owners, self.owners = self.owners, None
        if owners is not None:
            for _ in self._sequences:
                owners.end(self.name, self.version)

    def _forget(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.id, None) is not None and self.owners is not None:
            self.owners.end(self.name, self.version)
        if self.changes is not None:
            self.changes.changed[self, sequence.id] = None


class SequenceTurn:
    """Context manager for one request of a sequence.

    An error or cancellation in the block undoes the request. A class, since a generator would be much slower.
    """

    __slots__ = ("_control", "_is_default_version", "_manager", "_sequence")

    def __init__(self, manager: SequenceManager, control: SequenceControl, *, is_default_version: bool) -> None:
        self._manager = manager
        self._control = control
        self._is_default_version = is_default_version
        self._sequence: Sequence

    async def __aenter__(self) -> Sequence:
        """Wait for the turn.

        Raises:
            ServerError: see :meth:`SequenceManager.admit`; or the sequence was not started successfully.

        Cancellation: only while another request has the turn; the request leaves the queue.
        """
        try:
            sequence = self._sequence = self._manager.admit(self._control, is_default_version=self._is_default_version)
        except SequenceRestored:
            await trio.sleep(_REFUSAL_SECONDS)
            self._manager.accept(self._control, is_default_version=self._is_default_version)
            raise
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
        sequence, control = self._sequence, self._control
        if control.end if kind is None else control.start:
            sequence.owner.remove(sequence)
        elif control.end:
            sequence.ending = False
        sequence.end_turn()


@dataclass(slots=True, eq=False)
class Sequence:
    """Live sequence.

    Attributes:
        id: number, or text chosen by the client.
        owner: manager of the version that has the sequence.
        is_default_version: whether its first request was for the default version, which the sequence then follows.
        is_busy: whether a request has the turn; passed to the next waiting request without a gap.
        waiting: waiting requests, first in first out; created when the first request waits.
        state: model state; None before the first successful request.
        requests: number of successful requests.
        alive: False after the end; waiting requests must not run then.
        ending: whether the last request has been received.
        idle: whether no request has succeeded since the last scan.
        started_at: start time by trio's clock.
        used_at: time of the last successful request by trio's clock.
        lost_seconds: maximum age of steps lost when the server was killed; 0 from the next successful request on.
        is_refused: whether further steps are refused, as their client does not know of lost steps.
    """

    id: int | str
    owner: SequenceManager
    is_default_version: bool = field(kw_only=True)
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
    is_refused: bool = False

    def advance(self, state: State) -> None:
        """Store the state after a successful request."""
        self.state = state
        self.requests += 1
        self.idle = False
        self.lost_seconds = 0.0
        self.used_at = trio.current_time()
        if self.owner.changes is not None:
            self.note()

    async def wait_turn(self) -> None:
        """Wait behind earlier requests; cancellation leaves the queue."""
        if self.waiting is None:
            self.waiting = trio.lowlevel.ParkingLot()
        await self.waiting.park()

    def end_turn(self) -> None:
        """Pass the turn to the next request."""
        waiting = self.waiting
        self.is_busy = waiting is not None and bool(waiting.unpark())

    def note(self) -> None:
        """Record a change for the store, if any."""
        changes = self.owner.changes
        if changes is not None:
            changes.changed[self.owner, self.id] = self

    @property
    def info(self) -> SequenceInfo:
        """Public description of the sequence."""
        now = trio.current_time()
        idle_seconds = now - self.used_at
        return SequenceInfo(self.id, now - self.started_at, idle_seconds, self.requests, self.lost_seconds)


class SequenceChanges:
    """Latest changes of all sequences since the last write to the store.

    The cost of recording is independent of the number of requests of a sequence, and paid in each request.

    Attributes:
        changed: sequences by manager and id; None for a removed sequence.
        dropped: name and version of models whose manager was removed or replaced, with all its sequences.
    """

    __slots__ = ("changed", "dropped")

    def __init__(self) -> None:
        self.changed: dict[tuple[SequenceManager, int | str], Sequence | None] = {}
        self.dropped: set[tuple[str, int]] = set()

    def __bool__(self) -> bool:
        return bool(self.changed or self.dropped)

    def take(self) -> SequenceChanges:
        """Return the recorded changes and reset."""
        out = SequenceChanges()
        out.changed, self.changed = self.changed, out.changed
        out.dropped, self.dropped = self.dropped, out.dropped
        return out


# Managers of all models

log = structlog.get_logger(__name__)


class SequenceManagers:
    """One manager for each version of a stateful model; managers outlive loaded instances.

    Attributes:
        changes: records changes for a sequence store; None without a store.
        owners: sequences of all workers of the server; None for a single worker.
    """

    def __init__(self) -> None:
        self.changes: SequenceChanges | None = None
        self.owners: SequenceOwners | None = None
        self._managers: dict[tuple[str, int], SequenceManager] = {}

    def __iter__(self) -> Iterator[SequenceManager]:
        return iter(tuple(self._managers.values()))

    def open(self, spec: ModelSpec, version: int, variables: tuple[TensorSpec, ...]) -> SequenceManager:
        """Return the manager for a newly loaded instance, which must call :meth:`close`.

        Sequences with the same variables continue. Others are dropped, and all if ``sequence_migration`` is off.
        """
        manager = self._managers.get((spec.name, version))
        if manager is not None and not _can_continue(manager, spec, variables):
            log.warning("sequences dropped", model=spec.name, version=version, sequences=len(manager))
            manager = None
        if manager is None:
            manager = self.add(spec.name, version, variables)
        manager.capacity = spec.max_sequence_number
        manager.removes_idle = spec.idle_sequence_cleanup
        manager.can_migrate = spec.sequence_migration
        # Related versions share one id counter, restored or new.
        manager.next_id = max(each.next_id for each in (manager, *self._relatives(manager)))
        manager.servables += 1
        return manager

    def add(self, name: str, version: int, variables: tuple[TensorSpec, ...]) -> SequenceManager:
        """Create or replace the manager of a version whose instance may be loaded later."""
        manager = SequenceManager(name, version, variables)
        manager.related_managers = partial(self._relatives, manager)
        manager.changes = self.changes
        manager.owners = self.owners
        replaced = self._managers.get((name, version))
        if replaced is not None:
            replaced.stop_counting()
        self._managers[name, version] = manager
        self._note_dropped(name, version)
        return manager

    def is_current(self, manager: SequenceManager) -> bool:
        """Return whether a manager is still the current one of its version."""
        return self._managers.get((manager.name, manager.version)) is manager

    def _note_dropped(self, name: str, version: int) -> None:
        if self.changes is not None:
            self.changes.dropped.add((name, version))

    def close(self, manager: SequenceManager) -> None:
        """Close an instance, and its manager with the last instance.

        Sequences that follow the default version move to the highest other loaded version that can continue them.
        """
        manager.servables -= 1
        key = (manager.name, manager.version)
        if manager.servables or self._managers.get(key) is not manager:
            return
        del self._managers[key]
        self._note_dropped(*key)
        loaded = (other for other in self._relatives(manager) if other.servables)
        successor = max(loaded, key=lambda other: other.version, default=None)
        if successor is not None:
            for sequence in manager:
                if sequence.is_default_version and sequence.id not in successor:
                    successor.take(sequence)
        manager.stop_counting()

    def _relatives(self, manager: SequenceManager) -> Iterator[SequenceManager]:
        """Return the managers of other versions that can exchange sequences with a manager."""
        for other in self:
            same = other.name == manager.name and other.variables == manager.variables
            if same and other is not manager and other.can_migrate and manager.can_migrate:
                yield other


def _can_continue(manager: SequenceManager, spec: ModelSpec, variables: tuple[TensorSpec, ...]) -> bool:
    return manager.variables == variables and (spec.sequence_migration or not manager.servables)


# Removal of idle sequences

_MINUTE: Final = 60
_PORTION: Final = 500
"""Sequences scanned or removed between checkpoints; takes less than 1 ms."""


def remove_idle_sequences(managers: Iterable[SequenceManager]) -> int:
    """Remove the sequences without a successful request since the last scan; return their number."""
    return sum(_scan_portions(managers))


def _scan_portions(managers: Iterable[SequenceManager]) -> Iterator[int]:
    """Scan one portion at each step and yield the number of removed sequences."""
    # A snapshot: each sequence is scanned once, even if it moves to another manager meanwhile.
    found = [(manager, list(manager)) for manager in managers if manager.removes_idle]
    for manager, sequences in found:
        total = 0
        while sequences:
            removed = sum(map(_remove_if_idle, sequences[-_PORTION:]))
            # Released here: releasing all states at the end would block the loop.
            del sequences[-_PORTION:]
            total += removed
            yield removed
        if total:
            log.info("idle sequences removed", model=manager.name, version=manager.version, sequences=total)


def _remove_if_idle(sequence: Sequence) -> bool:
    """Remove a sequence that was idle at the last scan, else mark it as idle; skip busy sequences."""
    if sequence.is_busy or not sequence.alive:
        return False
    over = sequence.idle
    if over:
        sequence.owner.remove(sequence)
    sequence.idle = True
    return over


async def clean_sequences(managers: Iterable[SequenceManager], minutes: int) -> None:
    """Scan periodically; return at once if ``minutes`` is 0.

    An idle sequence is removed between one and two periods after its last request.
    """
    while minutes:
        await trio.sleep(minutes * _MINUTE)
        for _ in _scan_portions(managers):
            await trio.lowlevel.checkpoint()
