"""Batching: 64 clients of a model whose batch of 16 costs about twice as much as one row, with and without batching.

One row has to read every weight, and so has a batch; the model's weights are larger than any cache.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openvino as ov
import openvino.opset13 as op

from benchmarks.models import F32, write_repository
from benchmarks.processes import Server, h2load, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_infer_request

__all__ = ["run"]

ROUNDS = 5
CONNECTIONS = 4
STREAMS = 16
BATCH = 16
CALLS = 512
WIDTH = 4096
LAYERS = 3
GOAL = 5.0
BATCHING = {"max_batch_size": BATCH, "batch_timeout_ms": 20}


def wide() -> ov.Model:
    """FP32 ``b`` [1,4096] through square products with random weights is ``a``."""
    b = op.parameter([1, WIDTH], np.float32, name="b")
    b.output(0).set_names({"b"})
    random = np.random.default_rng(0)
    node: Any = b
    for _ in range(LAYERS):
        weights = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / np.float32(np.sqrt(WIDTH))
        node = op.matmul(node, weights, transpose_a=False, transpose_b=True)
    node.output(0).set_names({"a"})
    return ov.Model([op.result(node)], [b], "wide")


def _cost_ratio(model: ov.Model) -> float:
    """Return the time of a batch relative to one row, in OpenVINO alone."""
    model.reshape(ov.PartialShape([ov.Dimension(1, BATCH), WIDTH]))
    compiled = ov.Core().compile_model(model, "CPU", {**F32, "PERFORMANCE_HINT": "LATENCY"})
    seconds = {}
    for rows in (1, BATCH):
        values = np.ones((rows, WIDTH), np.float32)
        times = []
        for _ in range(15):
            begin = time.perf_counter()
            compiled([values])
            times.append(time.perf_counter() - begin)
        seconds[rows] = statistics.median(times)
    return seconds[BATCH] / seconds[1]


def _config(folder: Path) -> Path:
    """Serve the same files twice: ``plain`` without and ``joined`` with batching."""
    config = write_repository(folder, {"plain": wide()}, {})
    document = json.loads(config.read_text())
    (plain,) = document["model_config_list"]
    joined = {"config": {**plain["config"], "name": "joined", "batching": BATCHING}}
    config.write_text(json.dumps({"model_config_list": [plain, joined]}))
    return config


def _mean_batch(server: Server) -> float:
    text = httpx.get(f"http://127.0.0.1:{server.rest}/metrics").text
    sums = [
        re.search(rf'ovmstrio_batch_size_{part}{{name="joined",version="1"}} (\S+)', text) for part in ("sum", "count")
    ]
    rows, batches = (float(found[1]) if found else 0.0 for found in sums)
    return rows / batches if batches else 0.0


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _config(folder)
        values = np.ones((1, WIDTH), np.float32)
        bodies = {model: folder / f"{model}.bin" for model in ("plain", "joined")}
        for model, body in bodies.items():
            body.write_bytes(framed_infer_request(model, "b", values))
        with ovms(config) as server:
            rates: dict[str, list[float]] = {model: [] for model in bodies}
            for _ in range(ROUNDS + 1):
                for model, body in bodies.items():
                    rate = h2load(
                        server.grpc, "ModelInfer", body, calls=CALLS, connections=CONNECTIONS, streams=STREAMS
                    )
                    rates[model].append(rate)
            answered = _answered(server)
            mean_batch = _mean_batch(server)
    if answered != 2 * (ROUNDS + 1) * CALLS:
        sys.exit(f"not every call was answered: {answered}")
    cost = _cost_ratio(wide())
    plain, joined = (statistics.median(rates[model][1:]) for model in ("plain", "joined"))
    ratio = statistics.median(b / a for a, b in zip(rates["plain"][1:], rates["joined"][1:], strict=True))
    detail = (
        f"{joined:.0f}/s joined, {plain:.0f}/s without; {mean_batch:.1f} rows a batch; "
        f"a batch of {BATCH} takes {cost:.2f} times one row"
    )
    what = f"batching of up to {BATCH} rows, 64 clients, against the same model without"
    return [Row(what, ratio, f">= {GOAL:g}", ratio >= GOAL, detail)]


def _answered(server: Server) -> float:
    text = httpx.get(f"http://127.0.0.1:{server.rest}/metrics").text
    found = re.findall(r'ovms_requests_success{[^}]*interface="gRPC",method="ModelInfer"[^}]*} ([0-9.e+]+)', text)
    return sum(map(float, found))
