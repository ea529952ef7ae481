from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.config.specs import AllVersions, LatestVersions, ModelSpec
from ovmstrio.core.errors import SequenceExists, SequenceMissing
from ovmstrio.registry import VersionState
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.runtimes.models.sequences import Control, SequenceManagers
from tests.support import ir
from tests.support.answers import tensors
from tests.support.servables import EXACT, load_stateful, sequence_request
from tests.support.stub_registry import registry_of, running

START, END = 1, 2


class _Server:
    """A registry with an accumulator, and the calls of a client."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.width = 2
        self.nireq = 1
        self.managers = SequenceManagers()
        self.registry = registry_of(partial(load_model, managers=self.managers), poll_seconds=0)

    async def reload(self) -> Any:
        """Load the files again, as any changed setting makes the server do."""
        self.nireq += 1
        return await self.apply(nireq=self.nireq)

    async def apply(self, **settings: Any) -> Any:
        spec = ModelSpec(name="m", base_path=self.base / "m", plugin_config=EXACT, **{"stateful": True, **settings})
        return await self.registry.apply([spec])

    async def remove(self, version: int) -> None:
        shutil.rmtree(self.base / "m" / str(version))
        await self.registry.rescan()

    async def step(self, value: float, number: int = 5, control: int | None = None, version: str = "") -> float:
        """Send a request to the accumulator, and return the sum."""
        request = sequence_request({"x": np.full((1, self.width), value, np.float32)}, number=number, control=control)
        request.model_version = version
        with await self.registry.lease("m", version) as lease:
            return float(tensors(await lease.servable.infer(request))[0].array[0, 0])

    async def new_id(self) -> int:
        """Start a sequence, and return its generated id."""
        with await self.registry.lease("m") as lease:
            x = np.ones((1, self.width), np.float32)
            response = await lease.servable.infer(sequence_request({"x": x}, control=START))
        return int(tensors(response)[-1].array[0])


@asynccontextmanager
async def serving(base: Path) -> AsyncIterator[_Server]:
    server = _Server(base)
    ir.save(ir.accumulator(), base, "m")
    async with running(server.registry):
        await server.apply()
        yield server


async def test_sequences_go_on_after_a_reload_with_the_new_settings(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        before = server.registry.peek("m")
        await server.step(1, control=START)
        await server.apply(nireq=3, max_sequence_number=1)
        assert server.registry.peek("m") is not before
        assert await server.step(1) == 2
        ir.save(ir.accumulator(offset=100), tmp_path, "m")
        await server.reload()
        assert await server.step(1) == 103
        assert await server.step(1, control=END) == 104
        assert await server.step(1, control=START) == 101


async def test_requests_in_flight_end_on_the_old_instance(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        old = server.registry.peek("m")
        for number in (5, 6):
            await server.step(1, number, control=START)
        (manager,) = server.managers
        sums: list[float] = []

        async def send(value: float) -> None:
            sums.append(await server.step(value))

        async with trio.open_nursery() as nursery, manager.turn(Control(5)) as sequence:
            nursery.start_soon(send, 10)
            await trio.testing.wait_all_tasks_blocked()
            ir.save(ir.accumulator(offset=100), tmp_path, "m")
            await server.reload()
            assert server.registry.peek("m") is not old
            nursery.start_soon(send, 1000)
            assert await server.step(1, 6) == 102
            sequence.advance({"total": np.full((1, 2), 5, np.float32)})
            assert sums == []
        assert sums == [15, 1115]


async def test_model_of_other_variables_drops_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, control=START)
        ir.save(ir.accumulator(3), tmp_path, "m")
        await server.reload()
        server.width = 3
        with pytest.raises(SequenceMissing):
            await server.step(1)


async def test_failed_load_leaves_the_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, control=START)
        (tmp_path / "m" / "1" / "model.xml").write_text("<net")
        assert (await server.reload()).failures
        assert await server.step(1) == 2


async def test_sequences_follow_the_default_version_and_return_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for number in (5, 6, 7):
            await server.step(1, number, control=START)
        ir.save(ir.accumulator(offset=100), tmp_path, "m", version=2)
        await server.registry.rescan()
        assert server.registry.available_versions("m") == [2]
        assert await server.step(1, 5) == 102
        assert await server.step(1, 6) == 102
        with pytest.raises(SequenceExists):
            await server.step(1, 7, control=START)
        await server.remove(2)
        assert server.registry.available_versions("m") == [1]
        assert [await server.step(1, number) for number in (5, 6, 7)] == [3, 3, 2]
        assert len(list(server.managers)) == 1


async def test_sequences_of_a_named_version_stay_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        ir.save(ir.accumulator(offset=100), tmp_path, "m", version=2)
        await server.apply(version_policy=AllVersions())
        assert await server.step(1, 5, START, "1") == 1
        assert await server.step(2, 5, START, "2") == 102
        with pytest.raises(SequenceExists):
            await server.step(1, 5, START, "1")
        assert await server.step(1, 5, None, "1") == 2
        assert await server.step(1, 6, START, "1") == 1
        with pytest.raises(SequenceMissing):
            await server.step(1, 6)
        with pytest.raises(SequenceMissing):
            await server.step(1, 6, None, "2")


async def test_retired_model_drops_its_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, control=START)
        await server.registry.apply([])
        await trio.testing.wait_all_tasks_blocked()
        assert list(server.managers) == []
        await server.apply()
        with pytest.raises(SequenceMissing):
            await server.step(1)


@pytest.mark.parametrize("stateful", [True, False])
async def test_served_model_cannot_become_stateful_or_stateless(stateful: bool, tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.registry.apply([])
        assert (await server.apply(stateful=stateful)).failures == ()
        before = server.registry.peek("m")
        (failure,) = (await server.apply(stateful=not stateful)).failures
        assert "Model type cannot be changed after it is loaded" in failure.reason
        assert server.registry.peek("m") is before
        assert [status.state for status in server.registry.statuses()["m"]] == [VersionState.AVAILABLE]
        assert (await server.apply(stateful=stateful, version_policy=LatestVersions(num_versions=2))).failures == ()
        await server.registry.apply([])
        assert (await server.apply(stateful=not stateful)).failures == ()


async def test_generated_ids_are_unique_over_versions(tmp_path: Path) -> None:
    # A late request of a sequence that ended must not reach another client's.
    async with serving(tmp_path) as server:
        assert [await server.new_id(), await server.new_id()] == [1, 2]
        await server.step(1, 1, END)
        ir.save(ir.accumulator(), tmp_path, "m", version=2)
        await server.apply(version_policy=AllVersions())
        assert await server.new_id() == 3
        assert await server.step(1, 2) == 2
        await server.remove(2)
        await server.step(1, 3, END)
        assert await server.new_id() == 4


async def test_ids_of_the_old_default_version_are_taken_in_the_new_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.step(1, 5, START)
        ir.save(ir.accumulator(offset=100), tmp_path, "m", version=2)
        await server.apply(version_policy=AllVersions())
        with pytest.raises(SequenceExists):
            await server.step(50, 5, START, "2")
        assert await server.step(1, 5) == 102
        assert await server.step(7, 5, START, "1") == 7
        assert await server.step(1, 5) == 103


async def test_sequences_do_not_move_to_a_version_that_is_not_loaded(tmp_path: Path) -> None:
    managers = SequenceManagers()
    servable = await load_stateful(ir.accumulator(), tmp_path, managers=managers, version=2)
    (manager,) = managers
    restored = managers.add("model", 1, manager.variables)
    x = {"x": np.ones((1, 2), np.float32)}
    await servable.infer(sequence_request(x, number=5, control=START))
    await servable.aclose()
    assert 5 not in restored
