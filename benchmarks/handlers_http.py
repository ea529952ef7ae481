"""Handlers over HTTP: one that returns its JSON input, against a bare quart-trio route that does the same."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import cpu_seconds, free_ports, need, script
from benchmarks.report import Row

__all__ = ["run"]

ROUNDS = 5
SECONDS = 4
CONNECTIONS = 32
GOAL = 1.0

BODY = '{"inputs":[{"name":"b","shape":[1,10],"datatype":"FP32","data":[0,1,2,3,4,5,6,7,8,9]}]}'
_HANDLER = """
class Handler:
    def handle_post(self, payload):
        return payload
"""
_LUA = f"""
wrk.method = "POST"
wrk.body = '{BODY}'
wrk.headers["Content-Type"] = "application/json"
"""


def _project(folder: Path, *, log_level: str = "error") -> Path:
    (folder / "handler.py").write_text(_HANDLER)
    file = folder / "nucleus.yaml"
    file.write_text(f"type: python\npath: handler.py\nlog_level: {log_level}\n")
    return file


def _load(port: int, lua: Path) -> float:
    command = [need("wrk", "wrk"), "-t", "1", "-c", str(CONNECTIONS), "-d", f"{SECONDS}s", "-s", str(lua)]
    out = subprocess.run([*command, f"http://127.0.0.1:{port}/"], capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out:
        sys.exit(f"not every call succeeded:\n{out}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert rate is not None
    return float(rate[1])


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        lua = Path(folder) / "post.lua"
        lua.write_text(_LUA)
        ours_at, theirs_at = free_ports(2)
        serve = ["-m", "ovms_cli", "serve", str(_project(Path(folder))), "--port", str(ours_at)]
        serve += ["--rest_bind_address", "127.0.0.1", "--readiness_file", str(Path(folder) / "ready")]
        canned = ["-m", "benchmarks.handlers_http_canned", str(theirs_at)]
        with script(serve, ours_at) as ours, script(canned, theirs_at) as theirs:
            for _ in range(ROUNDS + 1):
                before = cpu_seconds(ours.process)
                rate = _load(ours.rest, lua)
                cpu = (cpu_seconds(ours.process) - before) / (rate * SECONDS) * 1e6
                pairs.append((rate, cpu, _load(theirs.rest, lua)))
    ratio = statistics.median(a / b for a, _, b in pairs[1:])
    rate, cpu, canned_rate = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    detail = f"{rate:.0f}/s at {cpu:.0f} us CPU, bare quart-trio route {canned_rate:.0f}/s"
    what = "Handler that returns its JSON, concurrency 32, against a bare quart-trio route on hypercorn"
    return [Row(what, ratio, f">= {GOAL}", ratio >= GOAL, detail)]
