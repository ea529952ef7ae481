"""Cost of a sequence: its state swapped in and out of shared infer requests, against a separate infer request."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import psutil
import structlog
import trio

from benchmarks.report import Row
from ovmstrio.config.specs import ModelSpec
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.infer_requests import InferMode, Slot
from ovmstrio.inference.network import Network
from ovmstrio.inference.tensors import StateChange
from ovmstrio.models.sequences import SequenceControl, SequenceManagers
from tests.support import ir

__all__ = ["run"]

COUNTS: Final = (10, 500, 10_000)
HIDDEN: Final = 512
FEATURES: Final = 80
STEPS: Final = 3_000
_TELLING: Final = 100


class _Swapping:
    """The server's method: states swapped in and out of shared infer requests."""

    def __init__(self, network: Network, spec: ModelSpec, count: int) -> None:
        self._network = network
        self._variables = {variable.name: variable for variable in network.variables}
        self._manager = SequenceManagers().open(spec, 1, network.variables)
        self._count = count

    async def start(self) -> None:
        for number in range(1, self._count + 1):
            await self._run(SequenceControl(number, start=True))

    async def step(self, number: int) -> None:
        await self._run(SequenceControl(number))

    async def _run(self, control: SequenceControl) -> None:
        async with self._manager.turn(control) as sequence:
            change = StateChange(self._variables, sequence.state, keep=True)
            await self._network.infer([_X], change)
            sequence.advance(change.after)


class _Holding:
    """The alternative: an infer request with its state for each sequence."""

    def __init__(self, model: Any, network: Network, count: int) -> None:
        self._make = partial(Slot, model, network.signature, InferMode.SYNCHRONOUS)
        self._count = count
        self._slots: list[Slot] = []

    async def start(self) -> None:
        self._slots = [self._make() for _ in range(self._count)]
        for number in range(1, self._count + 1):
            await self.step(number)

    async def step(self, number: int) -> None:
        slot = self._slots[number - 1]
        slot.bind([_X])
        slot.infer()
        slot.outputs()
        slot.unbind()


_X: Final = np.linspace(-1, 1, FEATURES, dtype=np.float32).reshape(1, FEATURES)


async def _measure(variant: str, count: int, folder: Path) -> dict[str, float]:
    ir.save(ir.lstm(FEATURES, HIDDEN), folder, "lstm")
    spec = ModelSpec(name="lstm", base_path=folder / "lstm", stateful=True, max_sequence_number=count)
    compiled = compile_model(ModelFile(folder / "lstm" / "1" / "model.xml", spec))
    network = Network(compiled)
    sequences: Any = _Swapping(network, spec, count) if variant == "swap" else _Holding(compiled.model, network, count)
    await network.infer([_X])
    before = psutil.Process().memory_info().rss
    await sequences.start()
    grown = psutil.Process().memory_info().rss - before
    random = Random(1)
    seconds = []
    for _ in range(STEPS):
        number = random.randrange(1, count + 1)
        begin = time.perf_counter()
        await sequences.step(number)
        seconds.append(time.perf_counter() - begin)
    return {"kilobytes": grown / count / 1e3, "microseconds": statistics.median(seconds) * 1e6}


def _apart(variant: str, count: int) -> dict[str, float]:
    """Measure in a separate process with unused memory."""
    command = [sys.executable, "-m", "benchmarks.sequence_cost", variant, str(count)]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def _rows(count: int) -> list[Row]:
    swapped, held = _apart("swap", count), _apart("hold", count)
    size, their_size = swapped["kilobytes"], held["kilobytes"]
    added = swapped["microseconds"] - held["microseconds"]
    # The memory of a few sequences fits into pages that the process already has.
    goal, met = ("less than held", size < their_size) if count >= _TELLING else ("none", True)
    note = "swapped in and out of a shared infer request, against an infer request held for each"
    return [
        Row(f"memory a sequence of {count}, LSTM of {HIDDEN}, kB", size, goal, met,
            f"held: {their_size:.3g} kB; {note}"),
        Row(f"time that swapping adds to a step with {count} sequences, us", added, "none", True,
            f"{swapped['microseconds']:.0f} us, held {held['microseconds']:.0f} us, no gRPC"),
    ]  # fmt: skip


def run() -> list[Row]:
    """Measure both at each number of sequences."""
    return [row for count in COUNTS for row in _rows(count)]


def _main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(trio.run(_measure, sys.argv[1], int(sys.argv[2]), Path(folder))))


if __name__ == "__main__":
    _main()
