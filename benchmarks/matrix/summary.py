"""Summary of the matrix: ratio to OpenVINO alone by size, hint, interface and concurrency; cost of open batches."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING, Final

from benchmarks.matrix.cells import CONCURRENCIES, HINTS, INTERFACES, SIZES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.matrix.runs import Run

__all__ = ["render_summary"]

_FIXED, _OPEN = ", fixed, ", ", dynamic, "
_ALONE, _WITH_NEIGHBOURS = ", alone, ", ", beside four, "


def render_summary(cells: Run) -> str:
    """Render tables of medians over fixed and open batches, with and without neighbours; a dash if not measured."""
    kinds: defaultdict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, cell in cells.items():
        size, _, hint, _, interface, callers = name.split(", ")
        kinds[f"{size}, {hint}"][interface, callers].append(cell["ratio"])
    callers = "/".join(map(str, CONCURRENCIES))
    interfaces = [
        interface
        for interface in INTERFACES
        if any((interface, str(CONCURRENCIES[0])) in each for each in kinds.values())
    ]
    lines = [
        f"| model | {' | '.join(f'{interface}, {callers}' for interface in interfaces)} |",
        "|---" * (len(interfaces) + 1) + "|",
    ]
    in_order = [kind for kind in map(", ".join, product(SIZES, HINTS)) if kind in kinds]
    for kind in [*in_order, *(kind for kind in kinds if kind not in in_order)]:
        lines += [f"| {kind} | {' | '.join(_interface_cells(kinds[kind], interface) for interface in interfaces)} |"]
    pairs = [] if len(interfaces) < len(INTERFACES) else ["", *_pairs(cells)]
    return "\n".join([*lines, *pairs])


def _interface_cells(figures: Mapping[tuple[str, str], list[float]], interface: str) -> str:
    ratios = (figures.get((interface, str(callers))) for callers in CONCURRENCIES)
    return " / ".join(f"{statistics.median(each):.2f}" if each else "-" for each in ratios)


_COMPARED: Final = (
    ("an open batch against a fixed one", _FIXED, _OPEN),
    ("with four other models against alone", _ALONE, _WITH_NEIGHBOURS),
)


def _pairs(cells: Run) -> list[str]:
    lines = [f"| calls a second, median of pairs of cells | {' | '.join(SIZES)} |", "|---" * (len(SIZES) + 1) + "|"]
    for what, one, other in _COMPARED:
        lines += [f"| {what} | {' | '.join(_of_pairs(cells, size, one, other) for size in SIZES)} |"]
    return lines


def _of_pairs(cells: Run, size: str, one: str, other: str) -> str:
    pairs = {name: name.replace(one, other) for name in cells if name.startswith(f"{size}, ") and one in name}
    ratios = [cells[second]["ratio"] / cells[first]["ratio"] for first, second in pairs.items() if second in cells]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"
