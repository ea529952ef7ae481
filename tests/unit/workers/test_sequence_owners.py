from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import SequenceExists, SequenceMissing, TooManySequences
from ovmstrio.models.sequences import Sequence, SequenceControl, SequenceManager, SequenceManagers
from ovmstrio.models.sequences.manager import remove_idle_sequences
from ovmstrio.models.sequences.store import SequenceStore
from ovmstrio.workers.owners import OwnerTimeouts, WorkerSequences
from ovmstrio.workers.rpc import WorkerRpc
from ovmstrio.workers.shared_state import SharedState
from tests.support.examples import examples

IDS = [*range(1, 7), "one", "two"]
MOST = 5
ROWS = 3
VERSIONS = (1, 2)


class _Processes:
    """The sequence owners and managers of several workers, in one process."""

    def __init__(self, rows: int = 2, most: int = 500) -> None:
        self._stack = ExitStack()
        self.state = SharedState.create(rows)
        self._stack.callback(self.state.close)
        self._most = most
        self.owners = [self._join(row) for row in range(rows)]
        self.managers = [self._begin(row) for row in range(rows)]

    def _join(self, row: int) -> WorkerSequences:
        state = SharedState(os.dup(self.state.descriptor), self.state.rows)
        self._stack.callback(state.close)
        return WorkerSequences(WorkerRpc("secret", state.rows, row), state, OwnerTimeouts(state, 5))

    def _begin(self, row: int) -> SequenceManagers:
        managers = SequenceManagers()
        managers.owners = self.owners[row]
        return managers

    def load(self, row: int, version: int = 1) -> SequenceManager:
        path = Path("m")
        spec = ModelSpec(name="m", base_path=path, stateful=True, max_sequence_number=self._most, origin="")
        return self.managers[row].open(spec, version, ())

    def die(self, row: int) -> None:
        self.state.clear(row)
        self.owners[row] = self._join(row)
        self.managers[row] = self._begin(row)

    def owner(self, identity: int | str) -> int:
        """Return the only worker that owns an id; all workers must agree."""
        found = {
            row if (other := owners.owner("m", identity)) is None else other for row, owners in enumerate(self.owners)
        }
        (row,) = found
        return row

    def ids_of(self, row: int, count: int) -> list[int]:
        return [each for each in range(1, 1000) if self.owner(each) == row][:count]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def two() -> Iterator[_Processes]:
    made = _Processes()
    yield made
    made.close()


def _start(manager: SequenceManager, identity: int | str = 0) -> Sequence:
    return manager.admit(SequenceControl(identity, start=True), is_default_version=False)


class _ServerMachine(RuleBasedStateMachine):
    """Workers of a server against the errors that clients must see."""

    def __init__(self) -> None:
        super().__init__()
        self.processes = _Processes(ROWS, MOST)
        self.alive: dict[tuple[int, int | str], int] = {}
        self.given: set[int] = set()

    @initialize()
    def load(self) -> None:
        self.loaded = {(row, version): self.processes.load(row, version) for row in range(ROWS) for version in VERSIONS}

    def count(self, version: int) -> int:
        return sum(each == version for each, _ in self.alive)

    @rule(version=st.sampled_from(VERSIONS), identity=st.sampled_from(IDS))
    def start(self, version: int, identity: int | str) -> None:
        row = self.processes.owner(identity)
        manager = self.loaded[row, version]
        if self.count(version) >= MOST:
            with pytest.raises(TooManySequences):
                _start(manager, identity)
        elif (version, identity) in self.alive:
            with pytest.raises(SequenceExists):
                _start(manager, identity)
        else:
            _start(manager, identity)
            self.alive[version, identity] = row

    @rule(row=st.integers(0, ROWS - 1), version=st.sampled_from(VERSIONS))
    def start_any(self, row: int, version: int) -> None:
        if self.count(version) >= MOST:
            with pytest.raises(TooManySequences):
                _start(self.loaded[row, version])
            return
        identity = int(_start(self.loaded[row, version]).id)
        assert identity not in self.given
        assert self.processes.owner(identity) == row
        self.given.add(identity)
        self.alive[version, identity] = row

    @rule(version=st.sampled_from(VERSIONS), identity=st.sampled_from(IDS))
    def end(self, version: int, identity: int | str) -> None:
        manager = self.loaded[self.processes.owner(identity), version]
        if (version, identity) in self.alive:
            manager.remove(manager.admit(SequenceControl(identity, end=True), is_default_version=False))
            del self.alive[version, identity]
        else:
            with pytest.raises(SequenceMissing):
                manager.admit(SequenceControl(identity), is_default_version=False)

    @rule(row=st.integers(0, ROWS - 1))
    def clean(self, row: int) -> None:
        for _ in range(2):
            remove_idle_sequences(self.processes.managers[row])
        self.forget(row)

    @rule(row=st.integers(0, ROWS - 1))
    def die(self, row: int) -> None:
        self.processes.die(row)
        self.forget(row)
        for version in VERSIONS:
            self.loaded[row, version] = self.processes.load(row, version)

    @rule(row=st.integers(0, ROWS - 1), version=st.sampled_from(VERSIONS))
    def reload(self, row: int, version: int) -> None:
        self.processes.managers[row].close(self.loaded[row, version])
        self.forget(row, version)
        self.loaded[row, version] = self.processes.load(row, version)

    def forget(self, row: int, version: int | None = None) -> None:
        ended = [key for key, each in self.alive.items() if each == row and version in {None, key[0]}]
        for key in ended:
            del self.alive[key]

    @invariant()
    def all_count_alike(self) -> None:
        for owners in self.processes.owners:
            for version in VERSIONS:
                assert owners.count("m", version) == self.count(version)

    def teardown(self) -> None:
        self.processes.close()


async def test_workers_agree_on_owners_and_counts_and_generate_each_id_once() -> None:
    run_state_machine_as_test(
        _ServerMachine, settings=settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
    )


async def test_failed_start_is_not_counted(two: _Processes) -> None:
    manager = two.load(0)
    async with manager.turn(SequenceControl(7, start=True, end=True)):
        assert two.owners[1].count("m", 1) == 1
    assert two.owners[1].count("m", 1) == 0
    with pytest.raises(ValueError, match="fails"):
        async with manager.turn(SequenceControl(7, start=True)):
            raise ValueError("fails")
    assert two.owners[1].count("m", 1) == 0


async def test_sequences_move_to_the_next_default_version_within_their_worker(two: _Processes) -> None:
    old, new = two.load(0, 1), two.load(0, 2)
    for identity in (3, 4):
        old.admit(SequenceControl(identity, start=True), is_default_version=True)
    moved = new.admit(SequenceControl(3), is_default_version=True)
    assert moved.owner == new
    assert [two.owners[1].count("m", version) for version in VERSIONS] == [1, 1]
    two.managers[0].close(old)
    assert [two.owners[1].count("m", version) for version in VERSIONS] == [0, 2]
    two.managers[0].close(new)
    assert two.owners[1].count("m", 2) == 0


async def test_restarted_worker_continues_the_sequences_of_its_store(two: _Processes, tmp_path: Path) -> None:
    manager = two.load(0)
    store = SequenceStore(two.managers[0], tmp_path, 5)
    await store.restore()
    ids = two.ids_of(0, 2)
    for identity in ids:
        _start(manager, identity).advance({})
    assert await store.save_at_end()
    two.managers[0].close(manager)
    two.die(0)
    assert two.owners[1].count("m", 1) == 0
    await SequenceStore(two.managers[0], tmp_path, 5).restore()
    assert [each.id for each in two.load(0)] == ids
    assert two.owners[1].count("m", 1) == 2


async def test_stored_sequences_of_other_workers_are_logged(two: _Processes, tmp_path: Path) -> None:
    store = SequenceStore(two.managers[0], tmp_path, 5)
    await store.restore()
    manager = two.load(0)
    own, other = two.ids_of(0, 1), two.ids_of(1, 2)
    # As releases stored them that kept a sequence in the worker where it started.
    for identity in (*own, *other):
        _start(manager, identity).advance({})
    assert await store.save_at_end()
    two.die(0)
    with structlog.testing.capture_logs() as logs:
        await SequenceStore(two.managers[0], tmp_path, 5).restore()
    assert [each.id for each in two.load(0)] == own
    assert [line["sequences"] for line in logs if line["event"] == "sequences not restored"] == [2]


async def test_generated_id_after_a_taken_one_is_not_repeated(two: _Processes) -> None:
    manager = two.load(0)
    taken, *_ = two.ids_of(0, 1)
    _start(manager, taken)
    generated = _start(manager).id
    manager.remove(manager.admit(SequenceControl(generated, end=True), is_default_version=False))
    assert (generated, _start(manager).id) == tuple(two.ids_of(0, 3)[1:])


async def test_generated_ids_ascend_and_belong_to_their_worker_also_after_its_end(two: _Processes) -> None:
    for row in (0, 1):
        assert [_start(two.load(row)).id for _ in range(3)] == two.ids_of(row, 3)
    two.die(1)
    assert [_start(two.load(1)).id for _ in range(2)] == two.ids_of(1, 5)[3:]


async def test_generated_ids_are_not_repeated_after_a_restart(tmp_path: Path) -> None:
    folders = [tmp_path / str(row) for row in range(2)]
    for folder in folders:
        folder.mkdir()
    given: list[int | str] = []
    for _ in range(2):
        processes = _Processes()
        stores = [SequenceStore(processes.managers[row], folder, 5) for row, folder in enumerate(folders)]
        for store in stores:
            await store.restore()
        loaded = [processes.load(row) for row in range(2)]
        sequences = [_start(loaded[row]) for row in (0, 1, 1, 1)]
        given += [each.id for each in sequences]
        for each in sequences:
            each.owner.remove(each)
        for manager in loaded:
            _start(manager).advance({})
        for store in stores:
            assert await store.save_at_end()
        processes.close()
    assert len({*given}) == len(given) == 8
