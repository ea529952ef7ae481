from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
import trio.testing
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, SequenceExists, SequenceRestored
from ovmstrio.core.tensor import BY_NAME, Dim, TensorSpec
from ovmstrio.models.sequences import SequenceControl, SequenceManager, SequenceManagers
from ovmstrio.models.sequences.manager import remove_idle_sequences
from ovmstrio.models.sequences.store import (
    STORE_FILE,
    CorruptStore,
    Segment,
    SequenceStore,
    lock_folder,
    read_segments,
    restore_sequences,
)
from ovmstrio.models.stateful import StatefulServable
from ovmstrio.transport.statuses import error_status
from tests.support import ir
from tests.support.servables import load_stateful, sequence_request, tensors

START = 1
TOTAL = (TensorSpec("total", BY_NAME["INT64"], (Dim.fixed(1),), None),)


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> trio.testing.MockClock:
    """Jump over all waiting; files are written on the event loop, since the clock would jump while a thread works."""

    async def run_sync(function: Any, *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr("ovmstrio.models.sequences.store.trio.to_thread.run_sync", run_sync)
    return autojump_clock


async def _infer(servable: StatefulServable, x: np.ndarray[Any, Any], number: int, control: int = 0) -> Any:
    return tensors(await servable.infer(sequence_request({"x": x}, number=number, control=control)))[0].array


async def _opened(folder: Path, seconds: float, *, strict: bool = True) -> tuple[SequenceManagers, SequenceStore]:
    managers = SequenceManagers()
    store = SequenceStore(managers, folder, seconds, is_strict=strict)
    await store.restore()
    return managers, store


def _fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ovmstrio.models.sequences.store.os.fsync", fail)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _encoded(managers: SequenceManagers, *, written_at: float) -> bytes:
    segment = Segment(written_at)
    for manager in managers:
        segment.manager_entry(manager)
        for sequence in manager:
            segment.add(manager, sequence.id, sequence)
    return b"".join(segment.encode())


async def _step(
    manager: SequenceManager, number: int | str, total: int, *, start: bool = False, end: bool = False
) -> None:
    async with manager.turn(SequenceControl(number, start=start, end=end)) as sequence:
        sequence.advance({"total": np.array([total])})


def _totals(managers: SequenceManagers) -> dict[tuple[int, int | str], int]:
    return {
        (manager.version, each.id): int(each.state["total"][0])
        for manager in managers
        for each in manager
        if each.state is not None
    }


def _restored(content: bytes, now: float = 0) -> SequenceManagers:
    """Read a file without writing to its folder."""
    managers = SequenceManagers()
    restore_sequences(managers, read_segments(content), now=now)
    return managers


async def test_next_server_continues_sequences_bit_for_bit(tmp_path: Path) -> None:
    inputs = np.random.default_rng(5).normal(size=(6, 1, 4)).astype(np.float32)
    managers, store = await _opened(tmp_path, 5)
    servable = await load_stateful(ir.lstm(), tmp_path, managers=managers)
    numbers = (1, 2**64 - 1)
    for number in numbers:
        for index, x in enumerate(inputs[:3]):
            await _infer(servable, x * (number % 7), number, int(index == 0))
    assert await store.save_at_end()
    with capture_logs() as logs:
        restored, _ = await _opened(tmp_path, 5)
    assert [(entry["event"], entry["sequences"], entry["lost_seconds"]) for entry in logs] == [
        ("sequences restored", 2, 0)
    ]
    assert 0 <= logs[0]["written_seconds_ago"] < 60
    again = await load_stateful(ir.lstm(), tmp_path, managers=restored, sequence_migration=False)
    assert [(each.id, each.requests, each.lost_seconds) for each in again.sequences()] == [(n, 3, 0) for n in numbers]
    for number in numbers:
        for x in inputs[3:]:
            np.testing.assert_array_equal(await _infer(again, x, number), await _infer(servable, x, number))


@pytest.mark.parametrize(
    ("model", "version", "kept"),
    [
        pytest.param(ir.accumulator(3), 1, [], id="other variables"),
        pytest.param(ir.accumulator(), 1, [5], id="same model"),
        pytest.param(ir.accumulator(), 2, [5], id="newer version"),
    ],
)
async def test_sequences_are_restored_for_models_of_the_same_variables(
    model: ov.Model, version: int, kept: list[int], tmp_path: Path
) -> None:
    managers = SequenceManagers()
    servable = await load_stateful(ir.accumulator(), tmp_path, managers=managers)
    x = np.ones((1, 2), np.float32)
    await _infer(servable, x, 5, START)
    restored = _restored(_encoded(managers, written_at=0))
    again = await load_stateful(model, tmp_path, managers=restored, version=version)
    for number in kept:
        assert (await _infer(again, x, number)).tolist() == [[2, 2]]
    assert [each.id for each in again.sequences()] == kept


async def test_ids_ages_and_marks_are_restored(autojump_clock: trio.testing.MockClock) -> None:
    managers = SequenceManagers()
    manager = managers.add("m", 1, ())
    for identity in ("a-b-c", "größe", "ended", 0):
        async with manager.turn(SequenceControl(identity, start=True, end=identity == "ended")) as sequence:
            sequence.advance({})
    await trio.sleep(100)
    remove_idle_sequences(managers)
    async with manager.turn(SequenceControl("not started", start=True)):
        (again,) = _restored(_encoded(managers, written_at=1_000), now=1_050)
    assert {each.id for each in again} == {"a-b-c", "größe", 1}
    for kept in again:
        assert [kept.info.age_seconds, kept.info.idle_seconds] == pytest.approx([150, 150])
        assert (kept.idle, again.next_id) == (True, 2)
    assert [kept.is_default_version for kept in again if kept.id == 1] == [True]


async def _killed(folder: Path, *, numbers: tuple[int, ...] = (7,), steps: int = 2) -> None:
    """Leave the file of a server that was killed after it had stored some steps."""
    managers, store = await _opened(folder, 5)
    manager = managers.add("m", 1, TOTAL)
    for number in numbers:
        for total in range(steps):
            await _step(manager, number, total, start=not total)
    assert await store.save()


async def test_next_step_after_a_kill_is_refused_once_with_the_number_of_restored_steps(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    await _killed(tmp_path, numbers=(7, 8), steps=3)
    (manager,), _ = await _opened(tmp_path, 5)
    refused = []

    async def send(end: bool) -> None:
        with pytest.raises(
            SequenceRestored, match="sequence 7 was restored with 3 steps, later steps may be lost"
        ) as info:
            await _step(manager, 7, 5, end=end)
        refused.append(info.value.steps)

    # Steps that the client had sent before it could know are refused, too.
    async with trio.open_nursery() as nursery:
        for end in (False, False, True):
            nursery.start_soon(send, end)
    assert refused == [3, 3, 3]
    assert error_status(SequenceRestored.of(7, 3)) == (Status.FAILED_PRECONDITION, 409)
    assert sorted((each.id, each.requests, each.info.lost_seconds) for each in manager) == [(7, 3, 5), (8, 3, 5)]
    await _step(manager, 7, 3)
    await _step(manager, 7, 6, end=True)
    assert [each.id for each in manager] == [8]


async def test_refusal_stands_until_a_client_has_received_it(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    await _killed(tmp_path)
    (manager,), _ = await _opened(tmp_path, 5)
    with trio.move_on_after(0.01):
        await _step(manager, 7, 5)
    with pytest.raises(SequenceRestored):
        await _step(manager, 7, 5)
    await _step(manager, 7, 5)


async def test_sequence_may_start_again_after_a_kill(tmp_path: Path) -> None:
    await _killed(tmp_path)
    (manager,), _ = await _opened(tmp_path, 5)
    manager.capacity = 1
    await _step(manager, 7, 1, start=True)
    ((sequence),) = manager
    assert (sequence.requests, sequence.info.lost_seconds) == (1, 0)
    manager.capacity = 2
    with pytest.raises(SequenceExists):
        await _step(manager, 7, 1, start=True)


@pytest.mark.parametrize("strict", [True, False])
async def test_first_response_after_a_kill_has_the_number_of_restored_steps(tmp_path: Path, *, strict: bool) -> None:
    managers, store = await _opened(tmp_path, 5)
    servable = await load_stateful(ir.accumulator(), tmp_path, managers=managers)
    x = np.ones((1, 2), np.float32)
    for control in (START, 0, 0):
        await _infer(servable, x, 7, control)
    assert await store.save()
    restored, _ = await _opened(tmp_path, 5, strict=strict)
    again = await load_stateful(ir.accumulator(), tmp_path, managers=restored)
    if strict:
        with pytest.raises(SequenceRestored):
            await _infer(again, x, 7)
    for total, parameters in ((4, {"ovmstrio_restored_steps": 3}), (5, {})):
        response = await again.infer(sequence_request({"x": x}, number=7))
        assert (tensors(response)[0].array.tolist(), response.parameters) == ([[total, total]], parameters)


async def test_drained_server_leaves_complete_sequences_unless_it_had_restored_incomplete_ones(tmp_path: Path) -> None:
    await _killed(tmp_path, numbers=(7, 8))
    (manager,), store = await _opened(tmp_path, 5, strict=False)
    await _step(manager, 8, 5)
    await _step(manager, 9, 5, start=True)
    assert await store.save_at_end()
    (manager,), store = await _opened(tmp_path, 5)
    assert {each.id: each.info.lost_seconds for each in manager} == {7: 5, 8: 0, 9: 0}
    for number in (8, 9):
        await _step(manager, number, 5)
    with pytest.raises(SequenceRestored, match="with 2 steps"):
        await _step(manager, 7, 5)


@given(st.data())
def test_damaged_segments_are_detected_and_earlier_ones_are_read(data: st.DataObject) -> None:
    content = _one_segment()
    position = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(changed), content[:position]):
        with pytest.raises(CorruptStore):
            read_segments(damaged)
        stored = read_segments(content + content + damaged)
        assert (len(stored.segments), stored.torn_bytes) == (2, len(damaged))


def _one_segment() -> bytes:
    managers = SequenceManagers()
    managers.add("m", 1, ())
    return _encoded(managers, written_at=0)


def test_other_version_of_the_format_is_reported() -> None:
    content = bytearray(_one_segment())
    content[8] = 3
    with pytest.raises(CorruptStore, match="unsupported format version 3, expected 2"):
        read_segments(bytes(content))


async def test_damaged_file_is_logged_and_renamed(tmp_path: Path) -> None:
    damaged = b"OVMTRSEQ and no more of a valid file, followed by other bytes"
    (tmp_path / STORE_FILE).write_bytes(damaged)
    with capture_logs() as logs:
        managers, _ = await _opened(tmp_path, 5)
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [("error", "sequences not restored")]
    assert (tmp_path / "sequences.bin.damaged").read_bytes() == damaged
    assert list(managers) == []


async def test_steps_are_in_the_file_after_the_configured_seconds(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    managers, store = await _opened(tmp_path, 4)
    manager = managers.add("m", 1, TOTAL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for second in range(30):
            await _step(manager, 7, second, start=not second)
            await trio.sleep(1)
            # The steps of seconds 0 to `second` were made; those up to four seconds ago must be in the file.
            if second >= 4:
                found = _totals(_restored((tmp_path / STORE_FILE).read_bytes()))
                assert second - 4 <= found[1, 7] <= second
        nursery.cancel_scope.cancel()
    with capture_logs() as logs:
        again, _ = await _opened(tmp_path, 4)
    assert logs[0]["lost_seconds"] == 4
    ((kept,),) = again
    assert kept.info.lost_seconds == 4
    assert kept.requests == _totals(again)[1, 7] + 1


async def test_only_changes_are_written_and_the_file_has_a_bounded_size(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    managers, store = await _opened(tmp_path, 2)
    manager = managers.add("m", 1, TOTAL)
    path = tmp_path / STORE_FILE
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        manager.capacity = 1000
        for number in range(1, 1001):
            await _step(manager, number, number, start=True)
        await trio.sleep(1.5)
        whole = path.stat().st_size
        assert whole > 1000 * 50
        sizes = set()
        for turn in range(20_000):
            await _step(manager, 1 + turn % 1000, turn)
            if turn % 100 == 0:
                before, inode = path.stat().st_size, path.stat().st_ino
                await _step(manager, 3, -turn)
                await trio.sleep(1.1)
                sizes.add(path.stat().st_size)
                if path.stat().st_ino == inode:
                    assert path.stat().st_size - before < 25_000
        nursery.cancel_scope.cancel()
    assert max(sizes) < whole + 2 * 2**20
    assert len(_totals(_restored((tmp_path / STORE_FILE).read_bytes()))) == 1000


@given(st.lists(st.tuples(st.sampled_from(["step", "end", "move", "drop", "save"]), st.integers(1, 3))))
def test_segments_together_hold_the_state_of_the_last_save(actions: list[tuple[str, int]]) -> None:
    async def run(folder: Path) -> None:
        managers, store = await _opened(folder, 5)
        versions = {version: managers.add("m", version, TOTAL) for version in (1, 2)}
        for place, (action, number) in enumerate(actions):
            there = [manager for manager in versions.values() if number in manager]
            if action == "step":
                manager = there[0] if there else versions[1 + place % 2]
                await _step(manager, number, place, start=not there)
            elif action == "end" and there:
                await _step(there[0], number, place, end=True)
            elif action == "move" and there:
                other = versions[3 - there[0].version]
                other.take(next(each for each in there[0] if each.id == number))
            elif action == "drop":
                version = 1 + place % 2
                versions[version] = managers.add("m", version, TOTAL)
            elif action == "save":
                assert await store.save()
                assert _totals(_restored((folder / STORE_FILE).read_bytes())) == _totals(managers)

    with tempfile.TemporaryDirectory() as folder:
        trio.run(run, Path(folder))


async def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    managers, store = await _opened(tmp_path, 5)
    manager = managers.add("m", 1, TOTAL)
    await _step(manager, 1, 10, start=True)
    await store.save()
    old = (tmp_path / STORE_FILE).read_bytes()
    await _step(manager, 1, 20)
    _fill_disk(monkeypatch)
    with capture_logs() as logs:
        for save in (store.save, store.save, store.save_at_end):
            assert not await save()
            assert (tmp_path / STORE_FILE).read_bytes() == old
    assert [entry["event"] for entry in logs] == ["sequences not saved"] * 2
    assert "No space left" in logs[0]["reason"]
    assert _names(tmp_path) == [STORE_FILE]
    # A server that ends before it has read the file writes nothing.
    assert await SequenceStore(SequenceManagers(), tmp_path, 5).save_at_end()
    assert (tmp_path / STORE_FILE).read_bytes() == old


async def test_steps_are_written_when_a_full_disk_has_room_again(
    tmp_path: Path, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    managers, store = await _opened(tmp_path, 5)
    async with trio.open_nursery() as nursery:
        with capture_logs() as logs:
            with monkeypatch.context() as patched:
                _fill_disk(patched)
                nursery.start_soon(store.run)
                await _step(managers.add("m", 1, TOTAL), 1, 10, start=True)
                await trio.sleep(20)
            await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert [entry["event"] for entry in logs] == ["sequences not saved", "sequence saving recovered"]
    assert _totals(_restored((tmp_path / STORE_FILE).read_bytes())) == {(1, 1): 10}


async def test_file_of_0_seconds_is_written_at_the_end_and_used_once(tmp_path: Path) -> None:
    managers, store = await _opened(tmp_path, 0)
    await _step(managers.add("m", 1, TOTAL), 1, 10, start=True)
    await store.run()
    assert _names(tmp_path) == []
    assert await store.save_at_end()
    again, _ = await _opened(tmp_path, 0)
    assert _totals(again) == {(1, 1): 10}
    assert _names(tmp_path) == []


def test_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the folder cannot be written"), lock_folder(tmp_path / "file", ""):
        pass
