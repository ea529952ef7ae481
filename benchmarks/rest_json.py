"""REST JSON: the trivial model served, against a bare quart-trio route with a canned answer, under the same wrk."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.models import trivial, write_repository
from benchmarks.processes import cpu_seconds, free_ports, need, ovms, script
from benchmarks.report import Row

ROUNDS = 5
SECONDS = 4
CONNECTIONS = 32
GOAL = 1.4

BODY = '{"inputs":[{"name":"b","shape":[1,10],"datatype":"FP32","data":[0,1,2,3,4,5,6,7,8,9]}]}'
PATH = "/v2/models/trivial/infer"
_LUA = f"""
wrk.method = "POST"
wrk.body = '{BODY}'
wrk.headers["Content-Type"] = "application/json"
"""


def _load(port: int, lua: Path) -> float:
    command = [need("wrk", "wrk"), "-t", "1", "-c", str(CONNECTIONS), "-d", f"{SECONDS}s", "-s", str(lua)]
    out = subprocess.run(
        [*command, f"http://127.0.0.1:{port}{PATH}"], capture_output=True, text=True, check=True
    ).stdout
    if "Non-2xx" in out:
        sys.exit(f"not every call succeeded:\n{out}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert rate is not None
    return float(rate[1])


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        config = write_repository(Path(folder), {"trivial": trivial()}, {})
        lua = Path(folder) / "post.lua"
        lua.write_text(_LUA)
        (port,) = free_ports(1)
        with ovms(config) as ours, script(["-m", "benchmarks.rest_quart_canned", str(port)], port) as theirs:
            for _ in range(ROUNDS + 1):
                before = cpu_seconds(ours.process)
                rate = _load(ours.rest, lua)
                cpu = (cpu_seconds(ours.process) - before) / (rate * SECONDS) * 1e6
                pairs.append((rate, cpu, _load(theirs.rest, lua)))
    ratio = statistics.median(a / b for a, _, b in pairs[1:])
    rate, cpu, canned = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    detail = f"{rate:.0f}/s at {cpu:.0f} us CPU, bare quart-trio route {canned:.0f}/s"
    what = "REST JSON, trivial model, concurrency 32, against a bare quart-trio route on hypercorn"
    return [Row(what, ratio, f">= {GOAL}", ratio >= GOAL, detail)]
