"""Runs of the matrix: JSON files, tables and comparison."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import machine

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Run", "differences", "is_worse", "read_run", "render_differences", "render_run", "save_run"]

Run = dict[str, dict[str, float]]
"""Figures by cell name."""

_WORTH_TELLING: Final = 0.1
_BETTER_IF_LESS: Final = ("cpu_us", "p50_us", "p99_us")
_COMPARED: Final = {"ratio": "spread", "cpu_us": "cpu_spread"}
"""What a change must not cost, each with how far its rounds lay apart; latencies in a closed loop follow the rate, and
p99 of a second is a few calls."""


def save_run(path: Path, cells: dict[str, dict[str, Any]]) -> None:
    """Write a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=1) + "\n")


def read_run(path: Path) -> Run:
    """Load the cells of a run; exit if the file does not exist."""
    try:
        cells: Run = json.loads(path.read_text())["cells"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{path} is no run of the matrix: {error}")
    return cells


def render_run(cells: Run) -> str:
    """Render a run as a table with one line per cell."""
    head = "| cell | of OpenVINO alone | spread | calls/s | alone/s | CPU a call, us | p50, us | p99, us |\n"
    lines = [
        f"| {name} | {each['ratio']:.2f} | {each['spread']:.0%} | {each['rate']:.0f} | {each['alone']:.0f} "
        f"| {each['cpu_us']:.0f} | {each['p50_us']:.0f} | {each['p99_us']:.0f} |"
        for name, each in cells.items()
    ]
    return head + "|---|---|---|---|---|---|---|---|\n" + "\n".join(lines)


def differences(before: Run, after: Run) -> list[tuple[str, str, float]]:
    """Find the cells of both runs that differ by more than 10 % and by more than the spread of the rounds of either.

    Returns cell, figure and relative change, regressions first.
    """
    found = []
    for cell in before.keys() & after.keys():
        for figure, apart in _COMPARED.items():
            change = after[cell][figure] / before[cell][figure] - 1
            noise = max(run[cell].get(apart, 0.0) for run in (before, after))
            if abs(change) > max(_WORTH_TELLING, noise):
                found.append((cell, figure, change))
    return sorted(found, key=lambda each: (_gain(each[1], each[2]), each[0]))


def is_worse(found: tuple[str, str, float]) -> bool:
    """Return whether a difference is a regression."""
    _, figure, change = found
    return _gain(figure, change) < 0


def _gain(figure: str, change: float) -> float:
    return -change if figure in _BETTER_IF_LESS else change


def render_differences(found: Iterable[tuple[str, str, float]]) -> str:
    """Render the differences as a table, or a message if there are none."""
    lines = [
        f"| {cell} | {figure} | {change:+.0%} | {'**worse**' if is_worse((cell, figure, change)) else 'better'} |"
        for cell, figure, change in found
    ]
    if not lines:
        return "no cell differs by more than a tenth and its own spread"
    return "| cell | figure | change | |\n|---|---|---|---|\n" + "\n".join(lines)
