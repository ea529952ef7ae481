"""Pipelines: overhead of a chain over a model, parallelism of nodes, and copied bytes of a tensor."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.copies import TENSOR_BYTES
from benchmarks.grpc_unary import request_bytes
from benchmarks.models import trivial, write_repository
from benchmarks.pipeline_files import add_pipelines, build, chain, side_by_side
from benchmarks.processes import Server, median_ms, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_infer_request

__all__ = ["run"]

ROUNDS = 15
CALLS = 1_500
SLEEPING_CALLS = 40
LENGTH = 3
SLEEP_MS = 20


def _chain(server: Server, folder: Path) -> Row:
    model, pipeline = folder / "model.bin", folder / "chain.bin"
    model.write_bytes(request_bytes())
    values = np.arange(10, dtype=np.float32).reshape(1, 10)
    pipeline.write_bytes(framed_infer_request("chain", "b", values))
    rounds = []
    for _ in range(ROUNDS + 1):
        one = median_ms(server.grpc, "ModelInfer", model, calls=CALLS)
        three = median_ms(server.grpc, "ModelInfer", pipeline, calls=CALLS)
        rounds.append((three / one, one, three))
    ratio, one, three = (statistics.median(row[i] for row in rounds[1:]) for i in range(3))
    return Row(
        f"chain of {LENGTH} trivial models, concurrency 1, median against one of them", ratio, "<= 1.5", ratio <= 1.5,
        f"{three:.3f} ms, model {one:.3f} ms",
    )  # fmt: skip


def _side_by_side(server: Server, folder: Path) -> Row:
    body = folder / "sleeping.bin"
    body.write_bytes(framed_infer_request("sleeping", "x", np.zeros((1, 1), np.float32)))
    times = [median_ms(server.grpc, "ModelInfer", body, calls=SLEEPING_CALLS) for _ in range(ROUNDS)]
    ratio = statistics.median(times) / SLEEP_MS
    return Row(
        f"two independent C nodes that sleep {SLEEP_MS} ms, median against one of them", ratio, "<= 1.15",
        ratio <= 1.15, f"{statistics.median(times):.2f} ms",
    )  # fmt: skip


def _copies(folder: Path) -> list[Row]:
    """Run the pipeline between the bytes of two messages, in a process whose copies are counted."""
    library, counting = build("idle", folder), build("counting", folder)
    config = write_repository(folder / "copies", {}, {})
    add_pipelines(config, [side_by_side("idle", "idle", 1)], {"idle": library})
    command = [sys.executable, "-m", "benchmarks.copies", str(config), str(library)]
    environment = {**os.environ, "LD_PRELOAD": str(counting)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    ways = json.loads(result.stdout.splitlines()[-1])
    rows = []
    for index, what in enumerate(("from the message into", "into the message out of")):
        copies = max(way[index] for way in ways) / TENSOR_BYTES
        detail = f"{TENSOR_BYTES} bytes; counted are large memcpy and memmove of the whole process"
        rows.append(Row(f"copies of a tensor {what} a C node", copies, "<= 1", copies <= 1, detail))
    return rows


def run() -> list[Row]:
    """Measure one server, and the copies without one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_repository(folder, {"trivial": trivial()}, {})
        pipelines = [chain("chain", "trivial", LENGTH), side_by_side("sleeping", "sleeping", 2)]
        add_pipelines(config, pipelines, {"sleeping": build("sleeping", folder)})
        with ovms(config) as server:
            rows = [_chain(server, folder), _side_by_side(server, folder)]
        return [*rows, *_copies(folder)]
