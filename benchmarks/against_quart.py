"""JSON over HTTP with wrk: this server and a bare quart-trio route with the same response, in turn."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.processes import cpu_seconds, need
from benchmarks.report import Row

if TYPE_CHECKING:
    from benchmarks.processes import Server

__all__ = ["BODY", "CONNECTIONS", "compare"]

ROUNDS = 5
SECONDS = 4
CONNECTIONS = 32

BODY = '{"inputs":[{"name":"b","shape":[1,10],"datatype":"FP32","data":[0,1,2,3,4,5,6,7,8,9]}]}'
_LUA = f"""
wrk.method = "POST"
wrk.body = '{BODY}'
wrk.headers["Content-Type"] = "application/json"
"""


def _rate(url: str, lua: Path) -> float:
    command = [need("wrk", "wrk"), "-t", "1", "-c", str(CONNECTIONS), "-d", f"{SECONDS}s", "-s", str(lua), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out:
        sys.exit(f"not every call succeeded:\n{out}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert rate is not None
    return float(rate[1])


def compare(what: str, goal: float, path: str, ours: Server, theirs: Server) -> Row:
    """Call both at the same path in turn, and compare medians; the first round is a warm-up."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        lua = Path(folder) / "post.lua"
        lua.write_text(_LUA)
        for _ in range(ROUNDS + 1):
            before = cpu_seconds(ours.process)
            rate = _rate(f"http://127.0.0.1:{ours.rest}{path}", lua)
            cpu = (cpu_seconds(ours.process) - before) / (rate * SECONDS) * 1e6
            pairs.append((rate, cpu, _rate(f"http://127.0.0.1:{theirs.rest}{path}", lua)))
    ratio = statistics.median(a / b for a, _, b in pairs[1:])
    rate, cpu, canned = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    detail = f"{rate:.0f}/s at {cpu:.0f} us CPU, bare quart-trio route {canned:.0f}/s"
    title = f"{what}, concurrency {CONNECTIONS}, against a bare quart-trio route on hypercorn"
    return Row(title, ratio, f">= {goal}", ratio >= goal, detail)
