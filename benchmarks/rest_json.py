"""REST JSON: the trivial model served, against a bare quart-trio route with a canned answer, under the same wrk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.against_quart import compare
from benchmarks.models import trivial, write_repository
from benchmarks.processes import ovms, script
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from benchmarks.report import Row

__all__ = ["PATH", "run"]

GOAL = 1.4
PATH = "/v2/models/trivial/infer"


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_repository(Path(folder), {"trivial": trivial()}, {})
        (port,) = free_ports(1)
        with ovms(config) as ours, script(["-m", "benchmarks.rest_quart_canned", str(port)], port) as theirs:
            return [compare("REST JSON, trivial model", GOAL, PATH, ours, theirs)]
