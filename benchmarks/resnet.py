"""ResNet-50's shape over gRPC at concurrency 4, against OpenVINO's own asynchronous queue with the same settings.

The queue runs in a process of its own and in turn with the server, which idles meanwhile.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import RESNET_SETTINGS, resnet50, write_repository
from benchmarks.processes import need, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_infer_request

ROUNDS = 7
INFERENCES = 300
CONCURRENCY = 4
GOAL = 0.98


def _queue_rate(model: Path) -> float:
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.resnet", str(model)], capture_output=True, text=True, check=True
    )
    return float(out.stdout)


def _served_rate(port: int, body: Path) -> float:
    command = [
        need("h2load", "nghttp2-client"),
        "-n",
        str(INFERENCES),
        "-c",
        "1",
        "-m",
        str(CONCURRENCY),
        "-d",
        str(body),
    ]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer"
    started = time.perf_counter()
    out = subprocess.run([*command, url], capture_output=True, text=True, check=True).stdout
    took = time.perf_counter() - started
    if f"{INFERENCES} succeeded" not in out:
        sys.exit(f"not every call succeeded:\n{out}")
    return INFERENCES / took


def _request_file(folder: Path) -> Path:
    path = folder / "request.bin"
    path.write_bytes(framed_infer_request("resnet50", "image", _image()))
    return path


def _image() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random((1, 3, 224, 224), np.float32)


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_repository(folder, {"resnet50": resnet50()}, {"resnet50": RESNET_SETTINGS}, nireq=CONCURRENCY)
        body = _request_file(folder)
        with ovms(config) as server:
            _served_rate(server.grpc, body)
            pairs = [
                (_served_rate(server.grpc, body), _queue_rate(folder / "resnet50" / "1" / "model.xml"))
                for _ in range(ROUNDS)
            ]
    ratio = statistics.median(a / b for a, b in pairs)
    served, queue = (statistics.median(column) for column in zip(*pairs, strict=True))
    detail = f"{served:.1f}/s served, {queue:.1f}/s by AsyncInferQueue, f32, THROUGHPUT, 4 infer requests each"
    return [
        Row(
            "ResNet-50 over gRPC, concurrency 4, against OpenVINO's own queue",
            ratio,
            f">= {GOAL}",
            ratio >= GOAL,
            detail,
        )
    ]


def _run_queue(model: str) -> None:
    import openvino as ov  # noqa: PLC0415

    compiled = ov.Core().compile_model(model, "CPU", RESNET_SETTINGS)
    queue = ov.AsyncInferQueue(compiled, CONCURRENCY)
    image = _image()
    for _ in range(2 * CONCURRENCY):
        queue.start_async([image], share_inputs=True)
    queue.wait_all()
    started = time.perf_counter()
    for _ in range(INFERENCES):
        queue.start_async([image], share_inputs=True)
    queue.wait_all()
    print(INFERENCES / (time.perf_counter() - started))


if __name__ == "__main__":
    _run_queue(sys.argv[1])
