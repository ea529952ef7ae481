"""Cost of a scrape of 200 models that were called over gRPC and REST: CPU of the server and bytes of the response."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
from tritonclient.grpc import InferenceServerClient, InferInput

from benchmarks.matrix.networks import input_of, network
from benchmarks.models import F32, write_repository
from benchmarks.processes import cpu_of_tree, ovms
from benchmarks.report import Row

if TYPE_CHECKING:
    from benchmarks.processes import Server

__all__ = ["run"]

_MODELS: Final = 200
_SCRAPES: Final = 10
_ROUNDS: Final = 3
_MAX_MS: Final = 150.0
_MAX_MB: Final = 0.5


def _call_all(server: Server, models: list[str]) -> None:
    name, array = input_of(network("10 us", is_dynamic=True))
    given = InferInput(name, list(array.shape), "FP32").set_data_from_numpy(array)
    body = {"inputs": [{"name": name, "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}]}
    with (
        InferenceServerClient(f"127.0.0.1:{server.grpc}") as grpc_client,
        httpx.Client(base_url=f"http://127.0.0.1:{server.rest}") as rest_client,
    ):
        for model in models:
            grpc_client.infer(model, [given])
            rest_client.post(f"/v2/models/{model}/infer", json=body).raise_for_status()


def _scrape(server: Server) -> tuple[float, int, int]:
    """Return the CPU of a scrape in milliseconds, and the bytes of its text and of the gzip response."""
    url = f"http://127.0.0.1:{server.rest}/metrics"
    with httpx.Client(headers={"accept-encoding": "gzip"}) as client:
        before = cpu_of_tree(server.process)
        for _ in range(_SCRAPES):
            response = client.get(url).raise_for_status()
        used = (cpu_of_tree(server.process) - before) / _SCRAPES * 1e3
    return used, len(response.content), int(response.headers["content-length"])


def run() -> list[Row]:
    """Measure one server."""
    with tempfile.TemporaryDirectory() as folder:
        models = {f"model{number:03}": network("10 us", is_dynamic=True) for number in range(_MODELS)}
        config = write_repository(Path(folder), models, dict.fromkeys(models, F32))
        with ovms(config, "--metrics_enable") as server:
            _call_all(server, list(models))
            figures = [_scrape(server) for _ in range(_ROUNDS)]
    used = statistics.median(each for each, _, _ in figures)
    _, text, sent = figures[-1]
    what = f"scrape of {_MODELS} models called over gRPC and REST"
    return [
        Row(f"{what}: CPU in ms", used, f"<= {_MAX_MS:g}", used <= _MAX_MS, "gzip included"),
        Row(
            f"{what}: MB with gzip",
            sent / 1e6,
            f"<= {_MAX_MB:g}",
            sent <= _MAX_MB * 1e6,
            f"{text / 1e6:.2f} MB without",
        ),
    ]
