from __future__ import annotations

import gc
import math
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import psutil
import pytest
import trio

from ovmstrio.core.tensor import Tensor
from ovmstrio.openvino.network import Network
from ovmstrio.runtimes.models.sequences import Sequence, SequenceManagers
from ovmstrio.runtimes.models.sequences.cleaner import scan
from ovmstrio.runtimes.models.stateful import StatefulServable
from ovmstrio.work.placement import Placement
from tests.support import ir
from tests.support.servables import sequence_request, stateful_over

START, END = 1, 2
SEQUENCES: Final = 2_000
REQUESTS: Final = 100_000
CLIENTS: Final = 40
STEPS: Final = 46
WIDTH: Final = 64
SCAN_EVERY: Final = 20_000
"""Requests between two scans of the cleaner; the sequences in use all have some in that time."""

MOST_GROWTH_BYTES: Final = 16 * 2**20


class _YieldingNetwork:
    """A network whose requests all come from its pool, with a checkpoint on either side of the inference."""

    def __init__(self, real: Network) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def infer(self, arrays: Any, change: Any, event: Any = None, most_bytes: float = math.inf) -> Any:
        await trio.lowlevel.checkpoint()
        outputs = await self._real.infer(arrays, change, event, most_bytes)
        await trio.lowlevel.checkpoint()
        return outputs


class _Soak:
    """The clients of one model, and what they count."""

    def __init__(self, servable: StatefulServable, managers: SequenceManagers) -> None:
        self._servable = servable
        self._managers = managers
        self._random = Random(11)
        self._numbers = iter(range(1, SEQUENCES + 1))
        self.sent = self.cancelled = self.removed = 0
        self.abandoned: list[int] = []
        self.resident: list[int] = []

    async def client(self) -> None:
        for number in self._numbers:
            await self._sequence(number)

    async def _sequence(self, number: int) -> None:
        abandoned = self._random.random() < 0.05
        await self._cancelled(number, START)
        total = await self._alone(number, 0, START)
        for _ in range(self._random.randrange(STEPS) if abandoned else STEPS):
            overlaps = self._random.random() < 0.02
            total = await (self._overlapping(number, total) if overlaps else self._alone(number, total, None))
        await self._cancelled(number, END)
        if abandoned:
            self.abandoned.append(number)
        else:
            await self._alone(number, total, END)

    async def _alone(self, number: int, total: int, control: int | None) -> int:
        value = self._random.randrange(1, 10)
        assert await self._send(number, value, control) == total + value
        return total + value

    async def _cancelled(self, number: int, control: int) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, 0, scope)
                await self._send(number, 100, control)
        assert scope.cancelled_caught
        self.cancelled += 1

    async def _overlapping(self, number: int, total: int) -> int:
        values: list[int] = []
        sums = [total]

        async def send(value: int, steps: int | None) -> None:
            with trio.CancelScope() as scope:
                if steps is not None:
                    nursery.start_soon(_cancel_after, steps, scope)
                sums.append(await self._send(number, value, None))
                values.append(value)
            self.cancelled += scope.cancelled_caught

        async with trio.open_nursery() as nursery:
            for steps in (None, None, 0, 2, 5):
                nursery.start_soon(send, self._random.randrange(1, 10), steps)
        # One after the other, in whichever order: each sum is of those before, and none is lost.
        sums.sort()
        assert sorted(after - before for before, after in pairwise(sums)) == sorted(values)
        return sums[-1]

    async def _send(self, number: int, value: int, control: int | None) -> int:
        self._count()
        x = {"x": np.full((1, WIDTH), value, np.float32)}
        x["x"][0, 1] = number
        response = await self._servable.infer(sequence_request(x, number=number, control=control))
        y = response.outputs[0]
        assert isinstance(y, Tensor)
        assert y.array[0, 1] % number == 0
        return int(y.array[0, 0])

    def _count(self) -> None:
        self.sent += 1
        if self.sent % SCAN_EVERY == 0:
            self.removed += scan(self._managers)
            gc.collect()
            self.resident.append(psutil.Process().memory_info().rss)


async def _cancel_after(steps: int, scope: trio.CancelScope) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


def _live(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


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
    assert soak.sent >= REQUESTS
    assert soak.cancelled >= 0.04 * soak.sent
    assert (real.pool.active, real.pool.waiting) == (0, 0)
    assert soak.resident[-1] - soak.resident[0] < MOST_GROWTH_BYTES
    soak.removed += scan(managers) + scan(managers)
    assert (servable.sequences(), soak.removed) == ([], len(soak.abandoned))
    assert _live(Sequence) == 0
