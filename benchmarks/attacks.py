"""Attacks: their effect on other clients, their CPU cost, and the memory that remains."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.report import Row
from tests.attacks.attacks import ATTACKS
from tests.attacks.measurement import GROWTH, Measurement, measure

DELAY_MS = 20.0


def _row(measured: Measurement) -> Row:
    met = measured.delay_ms <= DELAY_MS and measured.growth <= GROWTH
    detail = (
        f"{measured.outcome}; p50/p99/max {measured.quiet} ms without, {measured.attacked} ms with it; "
        f"{measured.cpu_seconds:.1f} s of CPU in {measured.seconds:.1f} s; "
        f"RSS {measured.before_mb:.0f}, at most {measured.peak_mb:.0f}, afterwards {measured.after_mb:.0f} MB"
    )
    what = f"attack: {ATTACKS[measured.attack].what}; ms that a neighbour's p99 grows by"
    return Row(what, measured.delay_ms, f"<= {DELAY_MS:.0f}, RSS <= {GROWTH:.1f} times", met, detail)


def run() -> list[Row]:
    """Run every attack, each on a separate server."""
    rows = []
    for name in ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_row(measure(name, Path(folder))))
    return rows
