"""Sequences in a file: whole and exact, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ovmstrio.core.tensor import Tensor
from ovmstrio.runtimes.models.sequences import Control, SequenceManagers
from ovmstrio.runtimes.models.sequences.cleaner import scan
from ovmstrio.runtimes.models.sequences.encoding import DamagedStore, decode, encode, fill
from ovmstrio.runtimes.models.sequences.store import STORE_FILE, restore_sequences, save_sequences
from ovmstrio.runtimes.models.stateful import StatefulServable
from tests.support import ir
from tests.support.servables import load_stateful, sequence_request

START = 1


async def _infer(servable: StatefulServable, x: np.ndarray[Any, Any], number: int, control: int = 0) -> Any:
    response = await servable.infer(sequence_request({"x": x}, number=number, control=control))
    output = response.outputs[0]
    assert isinstance(output, Tensor)
    return output.array


async def test_sequences_go_on_in_the_next_server(tmp_path: Path) -> None:
    """Numbers after a restart are those without one, bit for bit, and the file is consumed."""
    inputs = np.random.default_rng(5).normal(size=(6, 1, 4)).astype(np.float32)
    managers = SequenceManagers()
    servable = await load_stateful(ir.lstm(), tmp_path, managers=managers)
    for number in (1, 2**64 - 1):
        for index, x in enumerate(inputs[:3]):
            await _infer(servable, x * (number % 7), number, int(index == 0))
    await save_sequences(managers, tmp_path / "store" / "deep")
    assert [path.name for path in (tmp_path / "store" / "deep").iterdir()] == [STORE_FILE]

    restored = SequenceManagers()
    await restore_sequences(restored, tmp_path / "store" / "deep")
    assert list((tmp_path / "store" / "deep").iterdir()) == []
    again = await load_stateful(ir.lstm(), tmp_path, managers=restored, sequence_migration=False)
    assert [(each.id, each.requests) for each in again.sequences()] == [(1, 3), (2**64 - 1, 3)]
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
    content = encode(managers, written_at=0)
    for model, version, expected in ((ir.accumulator(3), 1, []), (ir.accumulator(), 1, [5])):
        restored = SequenceManagers()
        assert fill(restored, *decode(content), now=0) == 1
        again = await load_stateful(model, tmp_path, managers=restored, version=version)
        assert [each.id for each in again.sequences()] == expected
    restored = SequenceManagers()
    fill(restored, *decode(content), now=0)
    newer = await load_stateful(ir.accumulator(), tmp_path, managers=restored, version=2)
    assert (await _infer(newer, x, 5)).tolist() == [[2, 2]]


async def test_ages_count_on_while_no_server_runs(autojump_clock: trio.testing.MockClock) -> None:
    """What passed between the end and the start is idle time."""
    managers = SequenceManagers()
    manager = managers.add("m", 1, ())
    async with manager.turn(Control(0, start=True)) as sequence:
        sequence.advance({})
    await trio.sleep(100)
    scan(managers)
    content = encode(managers, written_at=1_000)
    restored = SequenceManagers()
    fill(restored, *decode(content), now=1_050)
    (again,) = restored
    (kept,) = again
    assert kept.id == 1
    assert [kept.info.age_seconds, kept.info.idle_seconds] == pytest.approx([150, 150])
    assert (kept.idle, kept.by_default, again.next_id) == (True, True, 2)


async def test_a_start_that_has_not_succeeded_is_not_saved() -> None:
    """Only what a request has succeeded in is worth keeping."""
    managers = SequenceManagers()
    async with managers.add("m", 1, ()).turn(Control(1, start=True)):
        index, _ = decode(encode(managers, written_at=0))
    assert index["managers"][0]["sequences"] == []


@given(st.data())
def test_damage_of_any_kind_is_seen(data: st.DataObject) -> None:
    """One changed, lost or added byte anywhere makes the file useless, and says so."""
    content = encode(_filled(), written_at=0)
    position = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(changed), content[:position], content + b"x"):
        with pytest.raises(DamagedStore):
            decode(damaged)


def _filled() -> SequenceManagers:
    managers = SequenceManagers()
    managers.add("m", 1, ())
    return managers


def test_another_version_of_the_format_is_named() -> None:
    """A file of a newer server is not damaged but not for this one either."""
    content = bytearray(encode(_filled(), written_at=0))
    content[8] = 2
    with pytest.raises(DamagedStore, match="version 2 of the format, and this server reads version 1"):
        decode(bytes(content))


async def test_a_damaged_file_is_told_and_left_alone(tmp_path: Path) -> None:
    """The server starts without it, and it stays for whoever wants to look."""
    managers = SequenceManagers()
    await restore_sequences(managers, tmp_path)
    (tmp_path / STORE_FILE).write_bytes(b"OVMTRSEQ but no more than that, and certainly not what belongs here")
    with capture_logs() as logs:
        await restore_sequences(managers, tmp_path)
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [("error", "sequences not restored")]
    assert (tmp_path / STORE_FILE).exists()
    assert list(managers) == []


async def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A server ends gently all the same."""
    (tmp_path / "file").touch()
    with capture_logs() as logs:
        await save_sequences(SequenceManagers(), tmp_path / "file")
    assert [entry["event"] for entry in logs] == ["sequences not saved"]


async def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced only by a whole one."""
    (tmp_path / STORE_FILE).write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ovmstrio.runtimes.models.sequences.store.os.fsync", full)
    with capture_logs() as logs:
        await save_sequences(_filled(), tmp_path)
    assert "No space left" in logs[0]["reason"]
    assert (tmp_path / STORE_FILE).read_bytes() == b"old"
