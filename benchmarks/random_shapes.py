"""Memory growth by requests of ever new shapes, with and without shape buckets.

python -m benchmarks.random_shapes    takes three to five minutes; docs/memory.md has the last recorded results
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openvino as ov
import openvino.opset13 as op

from benchmarks.models import F32, write_repository
from benchmarks.processes import Server, cpu_seconds, ovms

__all__: list[str] = []

WIDTH: Final = 256
LAYERS: Final = 4
ROWS: Final = 8
WORDS: Final = 256
REQUESTS: Final = 1000
LOOKS: Final = (100, 300, 600, 1000)
"""Numbers of requests after which memory is measured."""
BUCKETS: Final = {
    "batch": [1, 2, 4, 8],
    "words": {"sizes": [32, 64, 128, 256], "inputs": {"x": 1, "mask": 1}},
}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "no buckets, 5,000 entries kept": {"plugin_config": {**F32, "CPU_RUNTIME_CACHE_CAPACITY": "5000"}},
    "no buckets, 256 kept (default here)": {"plugin_config": F32},
    "buckets, 256 kept": {"plugin_config": F32, "shape_buckets": BUCKETS},
}


def attention() -> ov.Model:
    """Build attention layers: FP32 ``x`` [rows, words, 256] and ``mask`` [rows, words], which masks words."""
    x, mask = (op.parameter(ov.PartialShape(shape), np.float32) for shape in ([-1, -1, WIDTH], [-1, -1]))
    x.output(0).set_names({"x"})
    mask.output(0).set_names({"mask"})
    random = np.random.default_rng(0)
    left_out = op.unsqueeze(op.multiply(op.subtract(mask, np.float32(1)), np.float32(1e4)), op.constant(1))

    def dense(node: Any) -> Any:
        weights = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / np.float32(np.sqrt(WIDTH))
        return op.matmul(node, weights, transpose_a=False, transpose_b=True)

    node: Any = x
    for _ in range(LAYERS):
        scores = op.matmul(dense(node), dense(node), transpose_a=False, transpose_b=True)
        parts = op.softmax(op.add(op.multiply(scores, np.float32(WIDTH**-0.5)), left_out), 2)
        node = op.add(node, op.relu(dense(op.matmul(parts, dense(node), transpose_a=False, transpose_b=False))))
    node.output(0).set_names({"y"})
    return ov.Model([op.result(node)], [x, mask], "attention")


def _config(folder: Path, settings: dict[str, Any]) -> Path:
    config = write_repository(folder, {"attention": attention()}, {})
    document = json.loads(config.read_text())
    document["model_config_list"][0]["config"] |= settings
    config.write_text(json.dumps(document))
    return config


def _call(client: httpx.Client, rows: int, words: int) -> None:
    inputs = {"x": np.ones((rows, words, WIDTH), np.float32), "mask": np.ones((rows, words), np.float32)}
    described = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": "FP32",
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in inputs.items()
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = b"".join([head, *(array.tobytes() for array in inputs.values())])
    headers = {"Inference-Header-Content-Length": str(len(head))}
    client.post("/v2/models/attention/infer", content=body, headers=headers).raise_for_status()


def _measure(server: Server) -> str:
    """Return the cells of the table: memory before any request, its growth, and CPU per request."""
    random = np.random.default_rng(1)
    begun, before = server.resident_mb, cpu_seconds(server.process)
    grown = []
    with httpx.Client(base_url=f"http://127.0.0.1:{server.rest}", timeout=60) as client:
        for number in range(1, REQUESTS + 1):
            _call(client, int(random.integers(1, ROWS + 1)), int(random.integers(1, WORDS + 1)))
            if number in LOOKS:
                grown.append(str(round(server.resident_mb - begun)))
    milliseconds = 1e3 * (cpu_seconds(server.process) - before) / REQUESTS
    return " | ".join([f"{begun:.0f} MB", *grown, f"{milliseconds:.1f} ms"])


def _main() -> None:
    print(f"| | at the start | grown by {' | '.join(map(str, LOOKS))} requests | CPU a request |")
    print("|---" * (len(LOOKS) + 3) + "|")
    for what, settings in SETTINGS.items():
        with tempfile.TemporaryDirectory() as name, ovms(_config(Path(name), settings)) as server:
            print(f"| {what} | {_measure(server)} |", flush=True)


if __name__ == "__main__":
    _main()
