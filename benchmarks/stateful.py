"""Stateful models: a step against a call with its state as input, many sequences against few, and the cleaner."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks import sequence_cost, sequence_scan
from benchmarks.calls import call_rate
from benchmarks.models import write_repository
from benchmarks.processes import Server, cpu_seconds, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_tensors_request
from ovmstrio.core.tensor import Array
from tests.support import ir

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run"]

ROUNDS = 60
CALLS = 500
FEW, MANY = 50, 5_000
STEP_SEQUENCES = 16
SIZES: Final = {"tiny": (4, 8), "large": (80, 512)}
"""Features and hidden size: a small cell, and one of the size of speech models."""

_START: Final = 1


def _x(features: int) -> Array:
    return np.linspace(-1, 1, features, dtype=np.float32).reshape(1, features)


def _step(model: str, features: int, number: int, control: int | None = None) -> bytes:
    arrays = {"x": _x(features), "sequence_id": np.array([number], np.uint64)}
    if control is not None:
        arrays["sequence_control_input"] = np.array([control], np.uint32)
    return framed_tensors_request(model, arrays)


def _explicit(model: str, features: int, hidden: int) -> bytes:
    state = np.zeros((1, hidden), np.float32)
    return framed_tensors_request(model, {"x": _x(features), "hidden": state, "cell": state})


def _start(server: Server, model: str, features: int, numbers: range) -> list[bytes]:
    """Start sequences and return the bodies of their steps."""
    call_rate([server.grpc], [_step(model, features, number, _START) for number in numbers], len(numbers))
    return [_step(model, features, number) for number in numbers]


class _Side:
    """One side of a ratio: the call and its measured times."""

    def __init__(self, server: Server, bodies: Sequence[bytes]) -> None:
        self._server = server
        self._bodies = bodies
        self._cpu = 0.0
        self.rates: list[float] = []

    def measure(self) -> None:
        """Call a few hundred times, so that other load affects both sides of a pair."""
        before = cpu_seconds(self._server.process)
        self.rates.append(call_rate([self._server.grpc], self._bodies, CALLS))
        self._cpu += cpu_seconds(self._server.process) - before

    def __str__(self) -> str:
        cpu = self._cpu / len(self.rates) / CALLS * 1e6
        return f"{statistics.median(self.rates):.0f}/s at {cpu:.0f} us CPU"


def _ratio(ours: _Side, theirs: _Side) -> float:
    """Measure both in turn, in alternating order; return the median ratio of the rates."""
    for number in range(ROUNDS):
        for side in (ours, theirs) if number % 2 else (theirs, ours):
            side.measure()
    return statistics.median(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))


def _steps(server: Server, size: str) -> Row:
    features, hidden = SIZES[size]
    steps = _Side(server, _start(server, size, features, range(1, STEP_SEQUENCES + 1)))
    calls = _Side(server, [_explicit(f"{size}_explicit", features, hidden)])
    cost = _ratio(calls, steps)
    return Row(
        f"time of a stateful step over gRPC, LSTM of {hidden}, concurrency 8, against a call with its state in it",
        cost,
        "<= 1.15",
        cost <= 1.15,
        f"{steps}, with explicit state {calls}",
    )


def _many(server: Server, size: str) -> Row:
    features, hidden = SIZES[size]
    few = _Side(server, _start(server, f"{size}_few", features, range(1, FEW + 1)))
    many = _Side(server, _start(server, f"{size}_many", features, range(1, MANY + 1)))
    ratio = _ratio(many, few)
    return Row(
        f"steps/s with {MANY} live sequences against {FEW}, LSTM of {hidden}, concurrency 8",
        ratio,
        ">= 0.9",
        ratio >= 0.9,
        f"{many}, few {few}",
    )


def _make_stateful(config: Path, names: Sequence[str]) -> None:
    content = json.loads(config.read_text())
    for entry in content["model_config_list"]:
        if entry["config"]["name"] in names:
            entry["config"] |= {"stateful": True, "max_sequence_number": MANY}
    config.write_text(json.dumps(content))


def run() -> list[Row]:
    """Measure one server, then the parts alone."""
    stateful = {name + end: ir.lstm(*SIZES[name]) for name in SIZES for end in ("", "_few", "_many")}
    explicit = {f"{name}_explicit": ir.lstm(*SIZES[name], explicit=True) for name in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        config = write_repository(Path(folder), stateful | explicit, {})
        _make_stateful(config, list(stateful))
        with ovms(config) as server:
            rows = [measure(server, size) for measure in (_steps, _many) for size in SIZES]
    return [*rows, *sequence_scan.run(), *sequence_cost.run()]
