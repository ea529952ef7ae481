"""The managers of every stateful model, which outlive the loaded instances that use them.

A version that is loaded again gets a new instance.  If its variables are the same, the new one goes on with the same
manager: a request in flight has its turn on the old instance, and the next in its sequence on the new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import structlog

from ovmstrio.runtimes.models.sequences.manager import SequenceChanges, SequenceManager

if TYPE_CHECKING:
    from ovmstrio.config.specs import ModelSpec
    from ovmstrio.core.sequence_owners import SequenceDirectory
    from ovmstrio.core.tensor import TensorSpec

__all__ = ["SequenceManagers"]

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
