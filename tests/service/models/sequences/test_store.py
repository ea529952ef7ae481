"""Sequences in a file: whole and exact, or not at all, and never far behind."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Dim, Tensor, TensorSpec
from ovmstrio.runtimes.models.sequences import Control, SequenceManager, SequenceManagers
from ovmstrio.runtimes.models.sequences.cleaner import scan
from ovmstrio.runtimes.models.sequences.encoding import DamagedStore, Segment, fill, read_segments
from ovmstrio.runtimes.models.sequences.store import STORE_FILE, SequenceStore
from ovmstrio.runtimes.models.sequences.store_lock import LOCK_FILE, locked_folder
from ovmstrio.runtimes.models.stateful import StatefulServable
from tests.support import ir
from tests.support.servables import load_stateful, sequence_request

START = 1
TOTAL = (TensorSpec("total", BY_NAME["INT64"], (Dim.fixed(1),), None),)


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> trio.testing.MockClock:
    """Jump over all waiting, with files written in no time: the clock would jump while a thread works."""

    async def run_sync(function: Any, *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr("ovmstrio.runtimes.models.sequences.store.trio.to_thread.run_sync", run_sync)
    return autojump_clock


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def _infer(servable: StatefulServable, x: np.ndarray[Any, Any], number: int, control: int = 0) -> Any:
    response = await servable.infer(sequence_request({"x": x}, number=number, control=control))
    output = response.outputs[0]
    assert isinstance(output, Tensor)
    return output.array


def _encoded(managers: SequenceManagers, *, written_at: float) -> bytes:
    segment = Segment(written_at)
    for manager in managers:
        segment.mention(manager)
        for sequence in manager:
            segment.add(manager, sequence.id, sequence)
    return b"".join(segment.encode())


async def _step(
    manager: SequenceManager, number: int | str, total: int, *, start: bool = False, end: bool = False
) -> None:
    async with manager.turn(Control(number, start=start, end=end)) as sequence:
        sequence.advance({"total": np.array([total])})


def _totals(managers: SequenceManagers) -> dict[tuple[int, int | str], int]:
    """Give what every sequence remembers, by version and id."""
    return {
        (manager.version, each.id): int(each.state["total"][0])
        for manager in managers
        for each in manager
        if each.state is not None
    }


async def _restored(folder: Path) -> SequenceManagers:
    """Read a folder as the next server does, without writing to it."""
    managers = SequenceManagers()
    fill(managers, read_segments((folder / STORE_FILE).read_bytes()), now=0)
    return managers


async def test_sequences_go_on_in_the_next_server(tmp_path: Path) -> None:
    """Numbers after a restart are those without one, bit for bit, and nothing of the end is lost."""
    inputs = np.random.default_rng(5).normal(size=(6, 1, 4)).astype(np.float32)
    managers = SequenceManagers()
    store = SequenceStore(managers, tmp_path, 5)
    await store.restore()
    servable = await load_stateful(ir.lstm(), tmp_path, managers=managers)
    for number in (1, 2**64 - 1):
        for index, x in enumerate(inputs[:3]):
            await _infer(servable, x * (number % 7), number, int(index == 0))
    assert await store.save_at_end()

    restored = SequenceManagers()
    with capture_logs() as logs:
        await SequenceStore(restored, tmp_path, 5).restore()
    assert [(entry["event"], entry["sequences"], entry["lost_seconds"]) for entry in logs] == [
        ("sequences restored", 2, 0)
    ]
    assert 0 <= logs[0]["written_seconds_ago"] < 60
    again = await load_stateful(ir.lstm(), tmp_path, managers=restored, sequence_migration=False)
    assert [(each.id, each.requests, each.lost_seconds) for each in again.sequences()] == [
        (1, 3, 0),
        (2**64 - 1, 3, 0),
    ]
    for number in (1, 2**64 - 1):
        for x in inputs[3:]:
            expected = await _infer(servable, x, number)
            np.testing.assert_array_equal(await _infer(again, x, number), expected)


async def test_sequences_whose_model_is_another_one_now_are_dropped(tmp_path: Path) -> None:
    """States that do not fit are not used; a newer version with the same variables takes them over."""
    managers = SequenceManagers()
    servable = await load_stateful(ir.accumulator(), tmp_path, managers=managers)
    x = np.ones((1, 2), np.float32)
    await _infer(servable, x, 5, START)
    content = _encoded(managers, written_at=0)
    for model, version, expected in ((ir.accumulator(3), 1, []), (ir.accumulator(), 1, [5])):
        restored = SequenceManagers()
        assert fill(restored, read_segments(content), now=0) == 1
        again = await load_stateful(model, tmp_path, managers=restored, version=version)
        assert [each.id for each in again.sequences()] == expected
    restored = SequenceManagers()
    fill(restored, read_segments(content), now=0)
    newer = await load_stateful(ir.accumulator(), tmp_path, managers=restored, version=2)
    assert (await _infer(newer, x, 5)).tolist() == [[2, 2]]


async def test_ids_that_are_texts_are_kept() -> None:
    """A text of a client's is its sequence's id after a restart, too; an end is one."""
    managers = SequenceManagers()
    manager = managers.add("m", 1, ())
    for identity in ("a-b-c", "größe", "gone"):
        async with manager.turn(Control(identity, start=True, end=identity == "gone")) as sequence:
            sequence.advance({})
    restored = SequenceManagers()
    assert fill(restored, read_segments(_encoded(managers, written_at=0)), now=0) == 2
    (again,) = restored
    assert sorted(each.id for each in again if isinstance(each.id, str)) == ["a-b-c", "größe"]


async def test_ages_count_on_while_no_server_runs(autojump_clock: trio.testing.MockClock) -> None:
    """What passed between the end and the start is idle time."""
    managers = SequenceManagers()
    manager = managers.add("m", 1, ())
    async with manager.turn(Control(0, start=True)) as sequence:
        sequence.advance({})
    await trio.sleep(100)
    scan(managers)
    content = _encoded(managers, written_at=1_000)
    restored = SequenceManagers()
    fill(restored, read_segments(content), now=1_050)
    (again,) = restored
    (kept,) = again
    assert kept.id == 1
    assert [kept.info.age_seconds, kept.info.idle_seconds] == pytest.approx([150, 150])
    assert (kept.idle, kept.by_default, again.next_id) == (True, True, 2)


async def test_a_start_that_has_not_succeeded_is_not_saved() -> None:
    """Only what a request has succeeded in is worth keeping."""
    managers = SequenceManagers()
    async with managers.add("m", 1, ()).turn(Control(1, start=True)):
        ((index, _),), _ = read_segments(_encoded(managers, written_at=0))
    assert index["managers"][0]["sequences"] == []


@given(st.data())
def test_damage_of_any_kind_is_seen(data: st.DataObject) -> None:
    """One changed or lost byte anywhere makes a segment useless, and those before it remain."""
    content = _encoded(_filled(), written_at=0)
    position = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(changed), content[:position]):
        with pytest.raises(DamagedStore):
            read_segments(damaged)
        stored = read_segments(content + content + damaged)
        assert (len(stored.segments), stored.torn_bytes) == (2, len(damaged))


def _filled() -> SequenceManagers:
    managers = SequenceManagers()
    managers.add("m", 1, ())
    return managers


def test_another_version_of_the_format_is_named() -> None:
    """A file of a newer server is not damaged but not for this one either."""
    content = bytearray(_encoded(_filled(), written_at=0))
    content[8] = 3
    with pytest.raises(DamagedStore, match="version 3 of the format, and this server reads version 2"):
        read_segments(bytes(content))


async def test_a_damaged_file_is_told_and_put_aside(tmp_path: Path) -> None:
    """The server starts without it, and it stays for whoever wants to look."""
    managers = SequenceManagers()
    await SequenceStore(managers, tmp_path, 5).restore()
    damaged = b"OVMTRSEQ but no more than that, and certainly not what belongs here"
    (tmp_path / STORE_FILE).write_bytes(damaged)
    with capture_logs() as logs:
        await SequenceStore(managers, tmp_path, 5).restore()
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [("error", "sequences not restored")]
    assert (tmp_path / "sequences.bin.damaged").read_bytes() == damaged
    assert list(managers) == []


async def test_steps_are_in_the_file_after_the_time_that_was_promised(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """Whenever the server dies, what succeeded ``seconds`` before is there, and the next one says what may not be."""
    managers = SequenceManagers()
    store = SequenceStore(managers, tmp_path, 4)
    await store.restore()
    manager = managers.add("m", 1, TOTAL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for second in range(30):
            await _step(manager, 7, second, start=not second)
            await trio.sleep(1)
            # The steps of seconds 0 to `second` were made; those of four seconds ago and before must be there.
            if second >= 4:
                found = _totals(await _restored(tmp_path))
                assert second - 4 <= found[1, 7] <= second
        nursery.cancel_scope.cancel()
    again = SequenceManagers()
    with capture_logs() as logs:
        await SequenceStore(again, tmp_path, 4).restore()
    assert logs[0]["lost_seconds"] == 4
    ((kept,),) = again
    assert kept.info.lost_seconds == 4
    assert kept.requests == _totals(again)[1, 7] + 1


async def test_only_what_has_changed_is_written(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    """A step of one of a thousand sequences costs a few hundred bytes; the file does not grow for ever either."""
    managers = SequenceManagers()
    store = SequenceStore(managers, tmp_path, 2)
    await store.restore()
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
    assert len(_totals(await _restored(tmp_path))) == 1000


@given(st.lists(st.tuples(st.sampled_from(["step", "end", "move", "drop", "save"]), st.integers(1, 3))))
def test_a_file_of_changes_says_what_one_of_everything_says(deeds: list[tuple[str, int]]) -> None:
    """Whatever becomes of sequences, the segments together give what is there at the last save."""
    managers = SequenceManagers()

    async def run(folder: trio.Path) -> None:
        store = SequenceStore(managers, Path(folder), 5)
        await store.restore()
        versions = {version: managers.add("m", version, TOTAL) for version in (1, 2)}
        for place, (deed, number) in enumerate(deeds):
            there = [manager for manager in versions.values() if number in manager]
            if deed == "step":
                manager = there[0] if there else versions[1 + place % 2]
                await _step(manager, number, place, start=not there)
            elif deed == "end" and there:
                await _step(there[0], number, place, end=True)
            elif deed == "move" and there:
                other = versions[3 - there[0].version]
                other.take(next(each for each in there[0] if each.id == number))
            elif deed == "drop":
                version = 1 + place % 2
                versions[version] = managers.add("m", version, TOTAL)
            elif deed == "save":
                assert await store.save()
                assert _totals(await _restored(Path(folder))) == _totals(managers)

    async def in_a_folder() -> None:
        with tempfile.TemporaryDirectory() as folder:
            await run(trio.Path(folder))

    trio.run(in_a_folder)


async def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced only by a whole one, appended to only as a whole, and whoever ends the server is told."""
    managers = SequenceManagers()
    store = SequenceStore(managers, tmp_path, 5)
    await store.restore()
    await _step(managers.add("m", 1, TOTAL), 1, 10, start=True)
    await store.save()
    (manager,) = managers
    old = (tmp_path / STORE_FILE).read_bytes()
    await _step(manager, 1, 20)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr("ovmstrio.runtimes.models.sequences.store.os.fsync", full)
        assert not await store.save()
        assert not await store.save()
        assert (tmp_path / STORE_FILE).read_bytes() == old
        assert not await store.save_at_end()
    assert [entry["event"] for entry in logs] == ["sequences not saved"] * 2
    assert "No space left" in logs[0]["reason"]
    assert (tmp_path / STORE_FILE).read_bytes() == old
    assert _names(tmp_path) == [STORE_FILE]


async def test_what_could_not_be_written_is_written_when_there_is_room_again(
    tmp_path: Path, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full for a while costs nothing, though no further step is made."""
    managers = SequenceManagers()
    store = SequenceStore(managers, tmp_path, 5)
    await store.restore()
    manager = managers.add("m", 1, TOTAL)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    async with trio.open_nursery() as nursery:
        with capture_logs() as logs:
            with monkeypatch.context() as patched:
                patched.setattr("ovmstrio.runtimes.models.sequences.store.os.fsync", full)
                nursery.start_soon(store.run)
                await _step(manager, 1, 10, start=True)
                await trio.sleep(20)
            await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert [entry["event"] for entry in logs] == ["sequences not saved", "sequences saved again"]
    assert _totals(await _restored(tmp_path)) == {(1, 1): 10}


async def test_an_end_before_anything_was_read_keeps_the_file(tmp_path: Path) -> None:
    """A server that is told to end while it starts has nothing of its own to write."""
    managers = SequenceManagers()
    managers.add("m", 1, TOTAL)
    (tmp_path / STORE_FILE).write_bytes(_encoded(managers, written_at=0))
    old = (tmp_path / STORE_FILE).read_bytes()
    assert await SequenceStore(SequenceManagers(), tmp_path, 5).save_at_end()
    assert (tmp_path / STORE_FILE).read_bytes() == old


async def test_with_0_seconds_a_file_is_used_once(tmp_path: Path) -> None:
    """Nothing is written before the end, so that what is there is never older than its server."""
    managers = SequenceManagers()
    store = SequenceStore(managers, tmp_path, 0)
    await store.restore()
    await _step(managers.add("m", 1, TOTAL), 1, 10, start=True)
    await store.run()
    assert _names(tmp_path) == []
    assert await store.save_at_end()
    again = SequenceManagers()
    await SequenceStore(again, tmp_path, 0).restore()
    assert _totals(again) == {(1, 1): 10}
    assert _names(tmp_path) == []


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """The second is told who has it and what to do; when the first has gone there is nothing to clean up."""
    folder = tmp_path / "deep" / "store"
    with locked_folder(folder, "/etc/models.json"):
        with pytest.raises(ConfigError) as caught, locked_folder(folder, "other"):
            pass
        (problem,) = caught.value.problems
        assert f"process {os.getpid()} on {socket.gethostname()}, since 20" in problem.found
        assert problem.found.endswith("Z, serving /etc/models.json")
        assert problem.path == "--sequence_store"
        assert "stop that server first, or give this one another folder" in problem.suggestion
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    with locked_folder(folder, "other"):
        assert json.loads((folder / LOCK_FILE).read_text())["configuration"] == "other"


def test_a_folder_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    """Not when the sequences are to be kept."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the folder cannot be written"), locked_folder(tmp_path / "file", ""):
        pass
