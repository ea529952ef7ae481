"""While a hostile client attacks, the calls of another client are answered, and memory is returned afterwards.

``python -m benchmarks attacks`` measures how long the other client waits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.measuring import measure

pytestmark = pytest.mark.slow

GROWTH = 1.25
KEPT = 0.05
"""An allocator keeps some pages of the gigabytes that an attack makes a server allocate, which may be more than a
quarter of the memory of a server that has just started."""


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_stops_no_other_client_and_leaves_no_memory(tmp_path: Path, name: str) -> None:
    """The other client gets an answer to each call. Each attack starves a server of its own."""
    measured = measure(name, tmp_path, quiet_seconds=2.0)
    assert measured.attacked.count > 0
    assert measured.growth < GROWTH or measured.kept < KEPT, measured
