from __future__ import annotations

import trio
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.models.sequences import SequenceControl, SequenceManager, SequenceManagers
from ovmstrio.models.sequences.manager import clean_sequences, remove_idle_sequences
from tests.support.loops import scheduled

MINUTE = 60
INSTANT = 0.001


def _manager(managers: SequenceManagers, name: str = "model", *, cleaned: bool = True) -> SequenceManager:
    spec = ModelSpec(name=name, base_path="/", stateful=True, idle_sequence_cleanup=cleaned, max_sequence_number=20_000)
    return managers.open(spec, 1, ())


async def _request(manager: SequenceManager, number: int, *, start: bool = False) -> None:
    async with manager.turn(SequenceControl(number, start=start)) as sequence:
        sequence.advance({})


def _ids(manager: SequenceManager) -> list[int | str]:
    return sorted((sequence.id for sequence in manager), key=str)


async def test_sequence_is_removed_at_its_second_scan_without_a_request(autojump_clock: trio.testing.MockClock) -> None:
    managers = SequenceManagers()
    manager = _manager(managers)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clean_sequences, managers, 5)
        await trio.sleep(MINUTE)
        await _request(manager, 1, start=True)
        await _request(manager, 2, start=True)
        await trio.sleep(4 * MINUTE + INSTANT)
        assert _ids(manager) == [1, 2]
        await trio.sleep(4 * MINUTE)
        await _request(manager, 2)
        await trio.sleep(MINUTE - 2 * INSTANT)
        assert _ids(manager) == [1, 2]
        await trio.sleep(2 * INSTANT)
        assert _ids(manager) == [2]
        await trio.sleep(5 * MINUTE)
        assert _ids(manager) == []
        await _request(manager, 1, start=True)
        nursery.cancel_scope.cancel()


async def test_models_can_opt_out() -> None:
    managers = SequenceManagers()
    kept, cleaned = _manager(managers, "kept", cleaned=False), _manager(managers, "cleaned")
    for manager in (kept, cleaned):
        for number in (1, 2, 3):
            await _request(manager, number, start=True)
    assert (remove_idle_sequences(managers), remove_idle_sequences(managers)) == (0, 3)
    assert (_ids(kept), _ids(cleaned)) == ([1, 2, 3], [])


async def test_requests_run_between_portions_of_a_scan(autojump_clock: trio.testing.MockClock) -> None:
    managers = SequenceManagers()
    manager = _manager(managers)
    for number in range(1, 5_001):
        await _request(manager, number, start=True)
    remove_idle_sequences(managers)
    left = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clean_sequences, managers, 1)
        await trio.sleep(MINUTE)
        while len(manager) > 1:
            await _request(manager, 1)
            left.append(len(manager))
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert len(set(left)) > 2
    assert _ids(manager) == [1]


async def test_sequence_that_moves_during_a_scan_survives_it(autojump_clock: trio.testing.MockClock) -> None:
    managers = SequenceManagers()
    spec = ModelSpec(name="model", base_path="/", stateful=True)
    old, new = (managers.open(spec, version, ()) for version in (1, 2))
    await _request(old, 1, start=True)
    await _request(new, 2, start=True)
    (first,) = old
    # In the order in which tasks become runnable, the test runs between the two steps of the scan.
    with scheduled("forward"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clean_sequences, managers, 1)
            await trio.sleep(MINUTE)
            while not first.idle:
                await trio.lowlevel.checkpoint()
            # The scan has looked at the old version and not yet at the new one.
            assert not any(sequence.idle for sequence in new)
            managers.close(old)
            assert _ids(new) == [1, 2]
            await trio.sleep(MINUTE / 2)
            assert _ids(new) == [1, 2]
            nursery.cancel_scope.cancel()
    assert remove_idle_sequences(managers) == 2
