"""Startup time and memory of three servables with open batches: an addition, a perceptron and ResNet-50.

python -m benchmarks.three_servables [OTHER], a checkout that has an environment in ``.venv`` and is measured in turn
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import psutil

from benchmarks.matrix.networks import network
from benchmarks.models import F32, write_repository
from benchmarks.processes import cpu_seconds
from tests.support.ports import free_ports

__all__: list[str] = []

HERE: Final = Path(__file__).parents[1]
ROUNDS: Final = 5
START_SECONDS: Final = 120
SETTLED_SECONDS: Final = 3.0
"""Seconds between the readiness of a server and the measurement of its memory."""


class _Start(NamedTuple):
    """Seconds until ready, CPU seconds until then, and the memory of the idle server in MB."""

    ready: float
    cpu: float
    pss: float


def _write(folder: Path) -> Path:
    latency = {**F32, "PERFORMANCE_HINT": "LATENCY"}
    settings = {"trivial": {**latency, "INFERENCE_NUM_THREADS": "1"}, "perceptron": latency, "resnet": latency}
    sizes = {"trivial": "10 us", "perceptron": "1 ms", "resnet": "75 ms"}
    models = {name: network(size, is_dynamic=True) for name, size in sizes.items()}
    return write_repository(folder / "models", models, settings)


def _start(checkout: Path, config: Path) -> _Start:
    grpc, rest = free_ports(2)
    command = [str(checkout / ".venv" / "bin" / "ovms"), "serve", "--config_path", str(config)]
    command += ["--port", str(grpc), "--rest_port", str(rest), "--log_level", "ERROR"]
    begin = time.perf_counter()
    quiet = subprocess.DEVNULL
    # Installed packages have compiled bytecode, but a developer's shell may disable writing it.
    with_bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, cwd=checkout, env=with_bytecode, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_ready(process, rest, begin)
            ready = time.perf_counter() - begin
            server = psutil.Process(process.pid)
            used = cpu_seconds(server)
            threading.Event().wait(SETTLED_SECONDS)
            pss = server.memory_full_info().pss / 1e6
        finally:
            process.terminate()
    return _Start(ready, used, pss)


def _wait_ready(process: subprocess.Popen[bytes], port: int, begin: float) -> None:
    # Creating a client takes longer than a request, and uses a core that the server could use.
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_SECONDS) as client:
        while time.perf_counter() - begin < START_SECONDS and process.poll() is None:
            try:
                if client.get("/v2/health/ready").is_success:
                    return
            except httpx.TransportError:
                pass
            threading.Event().wait(0.01)
    sys.exit("the server did not become ready")


def _main() -> None:
    checkouts = {"here": HERE} | ({"other": Path(sys.argv[1]).resolve()} if len(sys.argv) > 1 else {})
    with tempfile.TemporaryDirectory() as name:
        config = _write(Path(name))
        for checkout in checkouts.values():
            _start(checkout, config)
        rounds = [{where: _start(checkout, config) for where, checkout in checkouts.items()} for _ in range(ROUNDS)]
    print("| checkout | seconds until ready | of processors | idle PSS, MB |\n|---|---|---|---|")
    for where in checkouts:
        ready, cpu, pss = (statistics.median(column) for column in zip(*(each[where] for each in rounds), strict=True))
        print(f"| {where} | {ready:.2f} | {cpu:.2f} | {pss:.0f} |")


if __name__ == "__main__":
    _main()
