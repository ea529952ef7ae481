from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import psutil
import pytest
import trio

from ovmstrio.inference.network import Network
from ovmstrio.inference.tuner import Placement
from ovmstrio.models.sequences import Sequence, SequenceManagers
from ovmstrio.models.sequences.manager import remove_idle_sequences
from ovmstrio.models.stateful import StatefulServable
from tests.support import ir
from tests.support.servables import sequence_request, stateful_over, tensors

START, END = 1, 2


SEQUENCES: Final = 2_000
CLIENTS: Final = 40
STEPS: Final = 50
WIDTH: Final = 64
SCAN_EVERY: Final = 20_000  # requests; each sequence in use has some in that time
MAX_GROWTH_BYTES: Final = 16 * 2**20


class _YieldingNetwork:
    def __init__(self, real: Network) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def infer(self, *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        outputs = await self._real.infer(*args)
        await trio.lowlevel.checkpoint()
        return outputs


class _Soak:
    def __init__(self, servable: StatefulServable, managers: SequenceManagers) -> None:
        self._servable = servable
        self._managers = managers
        self._random = Random(11)
        self._numbers = iter(range(1, SEQUENCES + 1))
        self.sent = self.cancelled = self.removed = self.abandoned = 0
        self.resident: list[int] = []

    async def client(self) -> None:
        for number in self._numbers:
            is_abandoned = self._random.random() < 0.05
            await self._cancel(number, START)
            total = await self._step(number, 0, START)
            for _ in range(self._random.randrange(STEPS) if is_abandoned else STEPS):
                total = await self._step(number, total, None)
                if self._random.random() < 0.02:
                    await self._cancel(number, None)
            await self._cancel(number, END)
            self.abandoned += is_abandoned
            if not is_abandoned:
                await self._step(number, total, END)

    async def _step(self, number: int, total: int, control: int | None) -> int:
        value = self._random.randrange(1, 10)
        assert await self._send(number, value, control) == total + value
        return total + value

    async def _cancel(self, number: int, control: int | None) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await self._send(number, 100, control)
        assert scope.cancelled_caught
        self.cancelled += 1

    async def _send(self, number: int, value: int, control: int | None) -> int:
        self.sent += 1
        if self.sent % SCAN_EVERY == 0:
            self.removed += remove_idle_sequences(self._managers)
            gc.collect()
            self.resident.append(psutil.Process().memory_info().rss)
        x = {"x": np.full((1, WIDTH), value, np.float32)}
        y = tensors(await self._servable.infer(sequence_request(x, number=number, control=control)))[0].array
        return int(y[0, 0])


@pytest.mark.slow
async def test_hundred_thousand_requests_lose_no_step_and_leave_nothing_behind(tmp_path: Path) -> None:
    managers = SequenceManagers()
    made: list[Network] = []

    def wrap(real: Network) -> _YieldingNetwork:
        made.append(real)
        return _YieldingNetwork(real)

    servable = stateful_over(
        ir.accumulator(WIDTH),
        tmp_path,
        wrap,
        managers=managers,
        placement=Placement.away(),
        nireq=2,
        max_sequence_number=CLIENTS + SEQUENCES // 10,
    )
    (real,) = made
    soak = _Soak(servable, managers)
    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(soak.client)
    assert soak.sent >= 100_000
    assert soak.cancelled >= 0.04 * soak.sent
    assert (real.pool.active, real.pool.waiting) == (0, 0)
    assert soak.resident[-1] - soak.resident[0] < MAX_GROWTH_BYTES
    soak.removed += remove_idle_sequences(managers) + remove_idle_sequences(managers)
    assert (servable.sequences(), soak.removed) == ([], soak.abandoned)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Sequence)]
