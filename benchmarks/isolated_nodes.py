"""Python nodes in processes against the same nodes in threads: cost of a call, and scaling over cores."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.graph_files import REGULAR, add_graphs
from benchmarks.models import trivial, write_repository
from benchmarks.processes import Server, h2load, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_bytes_request

__all__ = ["run"]

ROUNDS = 5
LARGE = 4 * 2**20
_HANDLERS = {"echo": "echo.py", "large": "filling.py", "busy": "busy.py"}


def _config(folder: Path) -> Path:
    """Write each graph twice: with threads, and with one process (two for the busy node)."""
    config = write_repository(folder, {"trivial": trivial()}, {})
    add_graphs(
        config, {f"{name}{suffix}": (file, REGULAR) for name, file in _HANDLERS.items() for suffix in ("", "_p")}
    )
    content = json.loads(config.read_text())
    for entry in content["mediapipe_config_list"]:
        if entry["name"].endswith("_p"):
            entry["python_isolation"] = "process"
            entry["python_processes"] = 2 if entry["name"] == "busy_p" else 1
    config.write_text(json.dumps(content))
    return config


def _compare(
    server: Server, folder: Path, name: str, size: int, *, calls: int, streams: int
) -> tuple[float, float, float]:
    """Return the ratio of the rates in processes and in threads, and both rates."""
    rates = []
    for suffix in ("_p", ""):
        (folder / f"{name}{suffix}.bin").write_bytes(framed_bytes_request(f"{name}{suffix}", "in", bytes(size)))
    for _ in range(ROUNDS + 1):
        ours, theirs = (
            h2load(server.grpc, "ModelInfer", folder / f"{name}{suffix}.bin", calls=calls, streams=streams)
            for suffix in ("_p", "")
        )
        rates.append((ours / theirs, ours, theirs))
    ratio, ours, theirs = (statistics.median(row[i] for row in rates[1:]) for i in range(3))
    return ratio, ours, theirs


def run() -> list[Row]:
    """Measure one server."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ovms(_config(folder)) as server:
            for what, key, size, calls, streams in (
                ("trivial, concurrency 1", "echo", 40, 2_000, 1),
                ("trivial, concurrency 8", "echo", 40, 4_000, 8),
                (f"{LARGE} bytes in and out, concurrency 1", "large", LARGE, 60, 1),
                ("2 processes, pure Python, concurrency 8", "busy", 40, 200, 8),
            ):
                ratio, ours, theirs = _compare(server, folder, key, size, calls=calls, streams=streams)
                more = (1 / ours - 1 / theirs) * 1e6 if streams == 1 else 0
                detail = f"{ours:.0f}/s, in threads {theirs:.0f}/s" + (f", {more:.0f} us more" if more else "")
                goal, is_met = (">= 1.5", ratio >= 1.5) if key == "busy" else ("none", True)
                rows.append(Row(f"Python node in a process, {what}, against threads", ratio, goal, is_met, detail))
    return rows
