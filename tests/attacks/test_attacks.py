"""The server keeps serving others during an attack and returns the memory; benchmarks measure the latency."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.measuring import measure
from tests.support.waits import WAIT_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GROWTH = 1.25
KEPT = 0.05
"""Of gigabytes that an attack makes a server take an allocator keeps some pages in which small things lie, which may be
more than a quarter of what a server has that has just started."""
QUIET_SECONDS = 2.0


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_leaves_no_memory(tmp_path: Path, name: str) -> None:
    """The server answers another client during the attack, and returns the memory afterwards."""
    measured = measure(name, tmp_path, quiet_seconds=QUIET_SECONDS)
    assert measured.attacked.slowest < WAIT_SECONDS * 1e3, measured
    assert measured.growth < GROWTH or measured.kept < KEPT, measured
