"""Commands of the matrix: measure, compare two runs, draw a chart."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.matrix.cells import BRIEF, FULL, MIDDLE, QUICK
from benchmarks.matrix.chart import chart
from benchmarks.matrix.measurement import measure
from benchmarks.matrix.runs import differences, is_worse, read_run, render_differences, render_run, save_run
from benchmarks.matrix.summary import render_summary
from benchmarks.report import machine, write_section

__all__ = ["compare", "draw", "measure_matrix"]

_RUNS: Final = Path(__file__).parents[1] / "runs"
_CHART: Final = Path(__file__).parents[2] / "docs" / "matrix.svg"
_PARTS: Final = {
    "quick": (QUICK, "what a change costs, in less than five minutes"),
    "brief": (BRIEF, "every size and shape over gRPC with eight callers, in less than ten minutes"),
    "middle": (MIDDLE, "models of some hundred microseconds by their settings and callers, in ten minutes"),
}
_HOW: Final = """Each cell is the median of {rounds} round(s) of at least {seconds:g} s: calls per second, divided by
those of the better of OpenVINO's `AsyncInferQueue` and a synchronous loop with the same model and settings, measured
alone just before. The load generator is h2load on the same cores. `{file}` has every cell, for
`python -m benchmarks compare`.

Machine: {machine}. Load average before: {load:.1f}.
"""
_SHOWN: Final = "\n![the matrix](../docs/matrix.svg)\n"


def measure_matrix(arguments: list[str]) -> None:
    """Measure the matrix or a part of it, print it, and save it; ``--record`` also writes results and chart.

    Ctrl-C stops the measurement and keeps the results so far.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks matrix", description=measure_matrix.__doc__)
    parts = parser.add_mutually_exclusive_group()
    for part, (_, help_text) in _PARTS.items():
        parts.add_argument(f"--{part}", dest="part", action="store_const", const=part, help=help_text)
    parser.add_argument("--record", action="store_true", help="write RESULTS.md and docs/matrix.svg")
    parser.add_argument("--save", type=Path, help="the run's file")
    parser.add_argument("--seconds", type=float, help="how long each cell is asked in a round, at least")
    parser.add_argument("--rounds", type=int, help="in how many rounds")
    options = parser.parse_args(arguments)
    grid = _PARTS[options.part][0] if options.part else FULL
    grid = replace(grid, seconds=options.seconds or grid.seconds, rounds=options.rounds or grid.rounds)
    path: Path = options.save or _RUNS / f"{options.part or 'matrix'}.json"
    load, _, _ = os.getloadavg()
    cells: dict[str, dict[str, Any]] = {}
    with suppress(KeyboardInterrupt):
        for of_model in measure(grid):
            cells |= of_model
            save_run(path, cells)
    print(render_run(cells))
    print(f"\nsaved as {path}")
    if options.record:
        section, first = ("middle", "") if options.part == "middle" else ("matrix", _SHOWN)
        if section == "matrix":
            _CHART.write_text(chart(cells))
        shown = path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path.name
        how = _HOW.format(rounds=grid.rounds, seconds=grid.seconds, file=shown, machine=machine(), load=load)
        write_section(section, f"{how}{first}\n{render_summary(cells)}")


def compare(arguments: list[str]) -> None:
    """Show the cells of two runs that differ by more than 10 %; exit with 1 on a regression."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=compare.__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = read_run(options.before), read_run(options.after)
    common = len(before.keys() & after.keys())
    if not common:
        sys.exit("no cell is in both runs: compare runs of the same part of the matrix")
    print(f"{common} cells in both")
    for cell in sorted(before.keys() ^ after.keys()):
        print(f"only {'before' if cell in before else 'after'}: {cell}")
    found = differences(before, after)
    print(render_differences(found))
    if any(map(is_worse, found)):
        sys.exit(1)


def draw(arguments: list[str]) -> None:
    """Draw a saved run as SVG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks chart", description=draw.__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)
    options.picture.write_text(chart(read_run(options.run)))
