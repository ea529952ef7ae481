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
from ovmstrio.core.worker_peers import SequenceMoved
from ovmstrio.models.sequences import Sequence, SequenceControl, SequenceManager, SequenceManagers
from ovmstrio.models.sequences.manager import remove_idle_sequences
from ovmstrio.models.sequences.store import SequenceStore
from ovmstrio.workers.sequence_forwarding import SharedSequenceDirectory
from ovmstrio.workers.shared_state import SequenceTable, SharedState, slots_for
from tests.support.examples import examples

SECRET = "secret"
IDS = [*range(1, 7), "one", "two"]
MOST = 5
ROWS = 3
VERSIONS = (1, 2)


class _Processes:
    """The sequence directories and managers of several workers, in one process."""

    def __init__(self, rows: int = 2, most: int = 500) -> None:
        self._stack = ExitStack()
        self.board = SharedState.create(rows)
        self._stack.callback(self.board.close)
        self._most = most
        self.boards: dict[int, SharedState] = {}
        self.directories = [self._join(row) for row in range(rows)]
        self.managers = [self._begin(row) for row in range(rows)]

    def _join(self, row: int) -> SharedSequenceDirectory:
        board = SharedState(os.dup(self.board.descriptor), self.board.rows)
        self._stack.callback(board.close)
        self.boards[row] = board
        return SharedSequenceDirectory(board, row, SECRET)

    def _begin(self, row: int) -> SequenceManagers:
        managers = SequenceManagers()
        managers.directory = self.directories[row]
        return managers

    def load(self, row: int, version: int = 1) -> SequenceManager:
        path = Path("m")
        spec = ModelSpec(name="m", base_path=path, stateful=True, max_sequence_number=self._most, origin="")
        return self.managers[row].open(spec, version, ())

    def die(self, row: int, *, keeps_sequences: bool = False) -> None:
        self.board.clear(row, keeps_sequences=keeps_sequences)
        self.directories[row] = self._join(row)
        self.managers[row] = self._begin(row)

    def owners(self, identity: int | str) -> set[int | None]:
        return {self.directories[row].find("m", identity) for row in range(self.board.rows)}

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def two() -> Iterator[_Processes]:
    made = _Processes()
    yield made
    made.close()


def _start(manager: SequenceManager, identity: int | str = 0) -> Sequence:
    return manager.admit(SequenceControl(identity, start=True), by_default=False)


class _SlotMachine(RuleBasedStateMachine):
    """Slots against a dictionary. There are few slots, so that keys collide."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}
        self.bytes = bytearray(SequenceTable.size(16))
        self.memory = SequenceTable(memoryview(self.bytes))

    @rule(key=st.integers(0, 40), row=st.integers(0, 255))
    def put(self, key: int, row: int) -> None:
        if key not in self.rows:
            is_room = len(self.rows) < 16
            assert self.memory.put(key, row) is is_room
            if is_room:
                self.rows[key] = row

    @rule(key=st.integers(0, 40))
    def remove(self, key: int) -> None:
        self.memory.remove(key)
        self.rows.pop(key, None)

    @rule(row=st.integers(0, 255))
    def clear(self, row: int) -> None:
        assert sorted(self.memory.keys(row)) == sorted(key for key, each in self.rows.items() if each == row)
        self.memory.clear(row)
        self.rows = {key: each for key, each in self.rows.items() if each != row}

    @invariant()
    def all_are_found(self) -> None:
        assert {key: self.memory.find(key) for key in range(41)} == {key: self.rows.get(key) for key in range(41)}

    @invariant()
    def nothing_is_left_behind(self) -> None:
        if not self.rows:
            assert not any(self.bytes)


_SlotMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestSlots = _SlotMachine.TestCase


class _ServerMachine(RuleBasedStateMachine):
    """Workers of a server against the owners and errors that clients must see."""

    def __init__(self) -> None:
        super().__init__()
        self.processes = _Processes(ROWS, MOST)
        self.alive: dict[tuple[int, int | str], int] = {}
        self.given: set[int] = set()

    @initialize()
    def load(self) -> None:
        self.loaded = {(row, version): self.processes.load(row, version) for row in range(ROWS) for version in VERSIONS}

    def owner(self, identity: int | str) -> int | None:
        return next((row for (_, each), row in self.alive.items() if each == identity), None)

    def count(self, version: int) -> int:
        return sum(each == version for each, _ in self.alive)

    @rule(row=st.integers(0, ROWS - 1), version=st.sampled_from(VERSIONS), identity=st.sampled_from(IDS))
    def start(self, row: int, version: int, identity: int | str) -> None:
        manager, owner = self.loaded[row, version], self.owner(identity)
        if self.count(version) >= MOST:
            with pytest.raises(TooManySequences):
                _start(manager, identity)
        elif owner not in {None, row}:
            with pytest.raises(SequenceMoved):
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
        assert self.owner(identity) is None
        self.given.add(identity)
        self.alive[version, identity] = row

    @rule(row=st.integers(0, ROWS - 1), version=st.sampled_from(VERSIONS), identity=st.sampled_from(IDS))
    def end(self, row: int, version: int, identity: int | str) -> None:
        manager = self.loaded[row, version]
        if self.alive.get((version, identity)) == row:
            manager.remove(manager.admit(SequenceControl(identity, end=True), by_default=False))
            del self.alive[version, identity]
        else:
            with pytest.raises(SequenceMissing):
                manager.admit(SequenceControl(identity), by_default=False)

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
    def all_know_the_same(self) -> None:
        for identity in [*IDS, *self.given]:
            assert self.processes.owners(identity) == {self.owner(identity)}
        for row in range(ROWS):
            for version in VERSIONS:
                assert self.processes.directories[row].count("m", version) == self.count(version)

    def teardown(self) -> None:
        self.processes.close()


async def test_all_workers_agree_on_owners_and_counts_of_sequences() -> None:
    run_state_machine_as_test(
        _ServerMachine, settings=settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
    )


async def test_id_of_an_ended_or_failed_sequence_may_start_elsewhere(two: _Processes) -> None:
    first, second = two.load(0), two.load(1)
    control = SequenceControl(7, start=True, end=True)
    async with first.turn(control):
        assert two.owners(7) == {0}
        with pytest.raises(SequenceMoved):
            _start(second, 7)
    assert two.owners(7) == {None}
    with pytest.raises(ValueError, match="fails"):
        async with second.turn(SequenceControl(7, start=True)):
            raise ValueError("fails")
    assert two.owners(7) == {None}
    _start(second, 7)
    assert two.owners(7) == {1}


async def test_sequences_move_to_the_next_default_version_within_their_worker(two: _Processes) -> None:
    old, new = two.load(0, 1), two.load(0, 2)
    for identity in (3, 4):
        old.admit(SequenceControl(identity, start=True), by_default=True)
    moved = new.admit(SequenceControl(3), by_default=True)
    assert (moved.owner, two.owners(3)) == (new, {0})
    assert [two.directories[1].count("m", version) for version in VERSIONS] == [1, 1]
    two.managers[0].close(old)
    assert [two.directories[1].count("m", version) for version in VERSIONS] == [0, 2]
    assert two.owners(4) == {0}
    two.managers[0].close(new)
    assert two.owners(3) == two.owners(4) == {None}
    assert two.directories[1].count("m", 2) == 0


async def test_restarted_worker_owns_the_sequences_of_its_store(two: _Processes, tmp_path: Path) -> None:
    manager = two.load(0)
    store = SequenceStore(two.managers[0], tmp_path, 5)
    await store.restore()
    _start(manager, 1).advance({})
    (key_of_first,) = two.board.sequences.keys(0)
    _start(manager, 2).advance({})
    (key_of_second,) = {*two.board.sequences.keys(0)} - {key_of_first}
    assert await store.save_at_end()
    two.managers[0].close(manager)
    assert (two.owners(1), two.owners(2)) == ({0}, {0})
    two.die(0, keeps_sequences=True)
    # As if 2 had ended after it was stored, and 3 had started.
    two.board.sequences.remove(key_of_second)
    _start(two.load(1), 2)
    two.directories[0].begin("m", 1, 3, 500)
    two.die(0, keeps_sequences=True)
    assert (two.owners(1), two.owners(2), two.owners(3)) == ({0}, {1}, {0})
    again = SequenceStore(two.managers[0], tmp_path, 5)
    await again.restore()
    two.managers[0].settle()
    assert (two.owners(1), two.owners(2), two.owners(3)) == ({0}, {1}, {None})
    assert [each.id for each in two.load(0)] == [1]
    assert two.directories[1].count("m", 1) == 2


async def test_generated_id_after_a_taken_one_is_not_repeated(two: _Processes) -> None:
    first, second = two.load(0), two.load(1)
    _start(first, 1)
    generated = _start(first).id
    first.remove(first.admit(SequenceControl(generated, end=True), by_default=False))
    assert (generated, _start(second).id) == (2, 3)


async def test_generated_ids_ascend_over_all_workers(two: _Processes) -> None:
    assert [_start(two.load(row)).id for row in (0, 1, 0, 1, 1)] == [1, 2, 3, 4, 5]
    _start(two.load(0), 6)
    assert _start(two.load(1)).id == 7
    two.die(1)
    assert _start(two.load(1)).id == 8


async def test_generated_ids_are_not_repeated_after_a_restart(tmp_path: Path) -> None:
    folders = [tmp_path / str(row) for row in range(2)]
    for folder in folders:
        folder.mkdir()
    given: list[list[int | str]] = []
    for _ in range(2):
        processes = _Processes()
        stores = [SequenceStore(processes.managers[row], folder, 5) for row, folder in enumerate(folders)]
        for store, managers in zip(stores, processes.managers, strict=True):
            await store.restore()
            managers.settle()
        loaded = [processes.load(row) for row in range(2)]
        sequences = [_start(loaded[row]) for row in (0, 1, 1, 1)]
        given.append([each.id for each in sequences])
        for each in sequences:
            each.owner.remove(each)
        _start(loaded[1]).advance({})
        for store in stores:
            assert await store.save_at_end()
        processes.close()
    assert given == [[1, 2, 3, 4], [6, 7, 8, 9]]


async def test_stored_sequences_beyond_the_capacity_are_logged(
    two: _Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _Processes()
    store = SequenceStore(before.managers[0], tmp_path, 5)
    await store.restore()
    manager = before.load(0)
    for identity in (1, 2, 3):
        _start(manager, identity).advance({})
    assert await store.save_at_end()
    before.close()
    sequences = two.boards[0].sequences
    put = sequences.put
    monkeypatch.setattr(sequences, "put", lambda key, row: two.owners(1) == {None} and put(key, row))
    with structlog.testing.capture_logs() as logs:
        await SequenceStore(two.managers[0], tmp_path, 5).restore()
    assert [each.id for each in two.load(0)] == [1]
    assert (two.owners(1), two.owners(2), two.directories[1].count("m", 1)) == ({0}, {None}, 1)
    assert [line["sequences"] for line in logs if line["event"] == "sequences not restored"] == [2]


@pytest.mark.parametrize(("count", "slots"), [(0, 2**16), (500, 2**16), (100_000, 2**19)])
def test_number_of_slots_follows_the_configured_sequences(count: int, slots: int) -> None:
    assert slots_for(count) == slots


async def test_start_is_refused_if_no_slot_is_free(two: _Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = two.load(0)
    monkeypatch.setattr(two.boards[0].sequences, "put", lambda *_: False)
    with pytest.raises(TooManySequences, match="restart the server"):
        _start(manager, 1)
    assert (len(manager), two.directories[1].count("m", 1)) == (0, 0)
    monkeypatch.undo()
    _start(manager, 1)
    assert two.owners(1) == {0}
