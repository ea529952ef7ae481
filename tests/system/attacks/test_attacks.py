"""While a hostile client does its worst, others are served as before, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.measuring import measure

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DELAY_MS = 500.0
DELAY_OF_BUSY_MS = 2_000.0
"""Of an attack that keeps both processors busy, so that other tests and the neighbour wait for them as well."""
BUSY = frozenset({"slow_readers"})
GROWTH = 1.25
KEPT = 0.05
"""Of gigabytes that an attack makes a server take an allocator keeps some pages in which small things lie, which may be
more than a quarter of what a server has that has just started."""
QUIET_SECONDS = 2.0


@pytest.mark.parametrize("name", ATTACKS)
def test_a_neighbour_hardly_notices_an_attack(tmp_path: Path, name: str) -> None:
    """Its slowest hundredth takes little longer, on a machine that tests share, and memory is given back."""
    measured = measure(name, tmp_path, quiet_seconds=QUIET_SECONDS)
    assert measured.delay_ms < (DELAY_OF_BUSY_MS if name in BUSY else DELAY_MS), measured
    assert measured.growth < GROWTH or measured.kept < KEPT, measured
