"""A model of ResNet-50's shape over gRPC at concurrency 4, against OpenVINO's asynchronous queue with equal settings.

The queue runs in a separate process, alternately with the server, which idles meanwhile.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.models import RESNET_SETTINGS, resnet50, write_repository
from benchmarks.processes import need, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_infer_request
from ovmstrio.core.tensor import Array

ROUNDS = 15
INFERENCES = 100
CONCURRENCY = 4
GOAL = 0.98


class _Queue:
    """OpenVINO's asynchronous queue in a separate process that idles between its turns."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.resnet", str(model)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.rate()

    def rate(self) -> float:
        """Run one round; return inferences per second."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """Stop the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


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


def _image() -> Array:
    return np.random.default_rng(0).random((1, 3, 224, 224), np.float32)


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_repository(folder, {"resnet50": resnet50()}, {"resnet50": RESNET_SETTINGS}, nireq=CONCURRENCY)
        body = _request_file(folder)
        with ovms(config) as server:
            _served_rate(server.grpc, body)
            queue = _Queue(folder / "resnet50" / "1" / "model.xml")
            pairs = [(_served_rate(server.grpc, body), queue.rate()) for _ in range(ROUNDS)]
            queue.close()
    ratio = statistics.median(a / b for a, b in pairs)
    served, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    detail = f"{served:.1f}/s served, {bare:.1f}/s by AsyncInferQueue, f32, THROUGHPUT, 4 infer requests each"
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
    import openvino as ov  # noqa: PLC0415 - only the child process needs it

    compiled = ov.Core().compile_model(model, "CPU", RESNET_SETTINGS)
    queue = ov.AsyncInferQueue(compiled, CONCURRENCY)
    image = _image()
    for _ in range(2 * CONCURRENCY):
        queue.start_async([image], share_inputs=True)
    queue.wait_all()
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(INFERENCES):
            queue.start_async([image], share_inputs=True)
        queue.wait_all()
        print(INFERENCES / (time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    _run_queue(sys.argv[1])
