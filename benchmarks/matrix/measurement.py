"""Measurement of a grid's cells, alternately with OpenVINO alone, as medians of a few rounds."""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.matrix.cells import Cell
from benchmarks.matrix.infer_requests import MeasuredModel, check_answer, infer_call, registered_memory
from benchmarks.matrix.load import LoadFigures, load
from benchmarks.matrix.networks import input_of, network
from benchmarks.matrix.openvino_baseline import openvino_alone
from benchmarks.models import trivial, write_repository
from benchmarks.processes import ovms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.matrix.cells import Grid, ModelCase
    from benchmarks.matrix.infer_requests import InferCall
    from benchmarks.matrix.openvino_baseline import OpenVinoAlone
    from benchmarks.processes import Server

__all__ = ["SETTLING_SECONDS", "Measurement", "measure"]

_MODEL = "measured"
_CYCLES = 2.5
"""Minimum number of responses per caller in a round."""
SETTLING_SECONDS = 11.0
"""Warm-up of a model without a hint under concurrency, during which the server chooses its streams."""
_INFERENCES_ALONE = 12
_ROUNDS_THAT_ALL_COUNT = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rounds of one cell: results of the server and of OpenVINO alone."""

    rounds: tuple[tuple[LoadFigures, float], ...]

    @property
    def ratios(self) -> list[float]:
        """Return the server's rate relative to OpenVINO's, by round."""
        return [figures.rate / alone for figures, alone in self.rounds]

    def summary(self) -> dict[str, float]:
        """Return medians, and the relative spread of the rounds in ratio and CPU per call."""
        ratio = statistics.median(self.ratios)
        figures = {
            name: statistics.median(getattr(round_, name) for round_, _ in self.rounds) for name in LoadFigures._fields
        }
        alone = statistics.median(alone for _, alone in self.rounds)
        cpu = [round_.cpu_us for round_, _ in self.rounds]
        return {"ratio": ratio, "spread": _apart(self.ratios), "alone": alone, **figures, "cpu_spread": _apart(cpu)}


def _apart(figures: Sequence[float]) -> float:
    """Return the spread of values relative to the median; of more than three values, the spread of the middle ones."""
    ordered = sorted(figures)
    inner = ordered[1:-1] if len(ordered) > _ROUNDS_THAT_ALL_COUNT else ordered
    return (inner[-1] - inner[0]) / (statistics.median(ordered) or 1.0)


def measure(grid: Grid) -> Iterator[dict[str, dict[str, Any]]]:
    """Measure a grid model by model; return summaries by cell name, and print progress to standard error."""
    for number, case in enumerate(grid.models, 1):
        print(f"{number}/{len(grid.models)} {case}", file=sys.stderr)
        yield {str(cell): measured.summary() for cell, measured in _of_model(case, grid).items()}


def _of_model(case: ModelCase, grid: Grid) -> dict[Cell, Measurement]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        target, config = _write(case, folder)
        server = stack.enter_context(ovms(config, "--allow_shared_memory"))
        alone = stack.enter_context(openvino_alone(folder / _MODEL / "1" / "model.xml", case.settings))
        stack.enter_context(registered_memory(target, server))
        calls = {interface: infer_call(interface, target, server, folder) for interface in grid.interfaces}
        return _rounds(case, grid, calls, server, alone)


def _write(case: ModelCase, folder: Path) -> tuple[MeasuredModel, Path]:
    model = network(case.size, is_dynamic=case.is_dynamic)
    neighbours = {f"neighbour{number}": trivial() for number in range(case.neighbours)}
    name, array = input_of(model)
    (output,) = model.outputs
    settings = {_MODEL: case.settings}
    return MeasuredModel(_MODEL, name, array, output.any_name), write_repository(
        folder, {_MODEL: model, **neighbours}, settings
    )


def _rounds(
    case: ModelCase, grid: Grid, calls: dict[Any, InferCall], server: Server, alone: OpenVinoAlone
) -> dict[Cell, Measurement]:
    """Measure all interfaces alternately, so that other load affects all of them."""
    for each in calls.values():
        check_answer(each)
        load(each, 1, 0.2, server.process)
    taken: dict[Cell, list[tuple[LoadFigures, float]]] = {}
    for concurrency in sorted(grid.concurrencies):
        if case.hint == "default" and concurrency == min(each for each in grid.concurrencies if each > 1):
            load(next(iter(calls.values())), concurrency, SETTLING_SECONDS, server.process)
        for _ in range(grid.rounds):
            bare = alone.rate(max(grid.seconds / 2, _INFERENCES_ALONE * case.seconds))
            seconds = max(grid.seconds, _CYCLES * concurrency * case.seconds)
            for interface, each in calls.items():
                figures = load(each, concurrency, seconds, server.process)
                taken.setdefault(Cell(case, interface, concurrency), []).append((figures, bare))
    return {cell: Measurement(tuple(rounds)) for cell, rounds in taken.items()}
