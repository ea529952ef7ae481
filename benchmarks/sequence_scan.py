"""Cleaner of idle sequences: duration for ten thousand sequences, and delay of a concurrent request."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import trio
import trio.testing

from benchmarks.report import Row
from ovmstrio.core.request import InferRequest
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.models.sequences.manager import clean_sequences, remove_idle_sequences
from ovmstrio.models.stateful import StatefulServable
from tests.support import ir
from tests.support.servables import load_stateful, sequence_request

__all__ = ["run"]

SEQUENCES: Final = 10_000
ROUNDS: Final = 7
_REQUESTS: Final = 40
"""Requests in a round, which is longer than a scan."""

_START: Final = 1
_MINUTE: Final = 60
_MILLISECONDS: Final = 1e3


def _step(number: int, control: int | None = None) -> InferRequest:
    return sequence_request({"x": np.ones((1, 4), np.float32)}, number=number, control=control)


class _Measurement:
    """Sequences that are restarted after the cleaner has removed them."""

    def __init__(self, servable: StatefulServable, managers: SequenceManagers, clock: trio.testing.MockClock) -> None:
        self._servable = servable
        self._managers = managers
        self._clock = clock

    async def start(self) -> None:
        """Start missing sequences; the next scan finds them in use."""
        alive = {info.id for info in self._servable.sequences()}
        for number in range(1, SEQUENCES + 1):
            await self._servable.infer(_step(number, None if number in alive else _START))

    async def scans(self) -> list[float]:
        """Return the milliseconds of a scan that marks all sequences, and of one that removes them."""
        await self.start()
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            remove_idle_sequences(self._managers)
            times.append((time.perf_counter() - begin) * _MILLISECONDS)
        return times

    async def delays(self) -> list[float]:
        """Return the additional latency in milliseconds during a scan that marks all, and one that removes them."""
        await self.start()
        slowest = []
        for number in (1, 2, None):
            if number is not None:
                self._clock.jump(_MINUTE)
            slowest.append(max([await self._request() for _ in range(_REQUESTS)]))
        *busy, alone = slowest
        return [each - alone for each in busy]

    async def _request(self) -> float:
        """Run other tasks first, as for a request that arrives on a socket."""
        begin = time.perf_counter()
        await trio.lowlevel.checkpoint()
        await self._servable.infer(_step(1))
        return (time.perf_counter() - begin) * _MILLISECONDS


async def _measure(folder: Path, clock: trio.testing.MockClock) -> tuple[list[float], list[float]]:
    managers = SequenceManagers()
    servable = await load_stateful(ir.lstm(), folder, managers=managers, max_sequence_number=SEQUENCES)
    measurement = _Measurement(servable, managers, clock)
    scans = [await measurement.scans() for _ in range(ROUNDS)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clean_sequences, managers, 1)
        await trio.testing.wait_all_tasks_blocked()
        delays = [await measurement.delays() for _ in range(ROUNDS)]
        nursery.cancel_scope.cancel()
    return [_median(scans, index) for index in (0, 1)], [_median(delays, index) for index in (0, 1)]


def _median(rounds: list[list[float]], index: int) -> float:
    return statistics.median(each[index] for each in rounds)


def run() -> list[Row]:
    """Measure in this process, on an otherwise idle event loop."""
    clock = trio.testing.MockClock()
    with tempfile.TemporaryDirectory() as folder:
        scans, delays = trio.run(_measure, Path(folder), clock, clock=clock)
    rows = []
    for index, what in enumerate(("marks", "removes")):
        took, delayed = scans[index], delays[index]
        rows += [
            Row(f"scan of the cleaner that {what} {SEQUENCES} sequences, ms", took, "< 10", took < 10,
                f"median of {ROUNDS}, no request in between"),
            Row(f"delay of the slowest request while the cleaner {what} {SEQUENCES} sequences, ms", delayed, "< 5",
                delayed < 5, f"median of {ROUNDS}, against the slowest of as many requests without a scan"),
        ]  # fmt: skip
    return rows
