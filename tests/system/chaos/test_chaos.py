"""Servers that are disturbed in many ways answer each call once, with the right values or a true error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import chaos
from tests.chaos.ledger import Said

SECONDS = 60
SEED = 7


@pytest.mark.slow
async def test_a_minute_of_all_disturbances(tmp_path: Path) -> None:
    report = await chaos(tmp_path, SECONDS, SEED)
    assert report.ledger.violations() == [], report
    assert sum(count for (_, said), count in report.ledger.counts.items() if said is Said.RIGHT) > 1_000
