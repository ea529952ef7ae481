"""HTTP handlers: a handler that returns its JSON input, against a bare quart-trio route that does the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.against_quart import compare
from benchmarks.processes import script
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from benchmarks.report import Row

__all__ = ["run"]

GOAL = 1.0

_HANDLER = """
class Handler:
    def handle_post(self, payload):
        return payload
"""


def _project(folder: Path) -> Path:
    (folder / "handler.py").write_text(_HANDLER)
    file = folder / "nucleus.yaml"
    file.write_text("type: python\npath: handler.py\nlog_level: error\n")
    return file


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    with tempfile.TemporaryDirectory() as folder:
        ours_at, theirs_at = free_ports(2)
        serve = ["-m", "ovmstrio.cli", "serve", str(_project(Path(folder))), "--port", str(ours_at)]
        serve += ["--rest_bind_address", "127.0.0.1", "--readiness_file", str(Path(folder) / "ready")]
        canned = ["-m", "benchmarks.handlers_http_canned", str(theirs_at)]
        with script(serve, ours_at) as ours, script(canned, theirs_at) as theirs:
            return [compare("Handler that returns its JSON", GOAL, "/", ours, theirs)]
