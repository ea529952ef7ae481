"""CPU cost of console viewers for a server that is idle, or whose services are each called once per second.

python -m benchmarks.console_viewers [SERVICES]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx

from benchmarks.processes import Server, cpu_seconds, ovms

__all__: list[str] = []

SERVICES: Final = 50
ROUNDS: Final = 4
SECONDS: Final = 10.0
SETTLED_SECONDS: Final = 3.0
GRAPH: Final = """
input_stream: "in"
output_stream: "out"
node { calculator: "PassThroughCalculator" input_stream: "in" output_stream: "out" }
"""
ASKED: Final = {"inputs": [{"name": "in", "shape": [1], "datatype": "FP32", "data": [1]}]}


def _configuration(folder: Path, services: int) -> Path:
    (folder / "graph.pbtxt").write_text(GRAPH)
    entries = [{"name": f"graph_{number}", "base_path": str(folder)} for number in range(services)]
    path = folder / "config.json"
    path.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": entries}))
    return path


def _call_each_second(server: Server, services: int, ends: threading.Event) -> None:
    """Call every service once per second, evenly spaced."""
    with httpx.Client(base_url=f"http://127.0.0.1:{server.rest}", trust_env=False) as client:
        number = 0
        while not ends.wait(1 / services):
            client.post(f"/v2/models/graph_{number % services}/infer", json=ASKED).raise_for_status()
            number += 1


def _view(server: Server, ends: threading.Event) -> None:
    url = f"http://127.0.0.1:{server.rest}/console/api/live"
    with httpx.Client(trust_env=False, timeout=30) as client, client.stream("GET", url) as stream:
        for _ in stream.iter_raw():
            if ends.is_set():
                return


def _milliseconds(server: Server, viewers: int) -> float:
    """Return the server's CPU milliseconds per second with a number of viewers."""
    ends = threading.Event()
    threads = [threading.Thread(target=_view, args=(server, ends)) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    threading.Event().wait(SETTLED_SECONDS)
    began, before = time.perf_counter(), cpu_seconds(server.process)
    threading.Event().wait(SECONDS)
    taken = (cpu_seconds(server.process) - before) / (time.perf_counter() - began)
    ends.set()
    for thread in threads:
        thread.join()
    return taken * 1e3


def _rows(server: Server, label: str) -> None:
    counts = (0, 1, 20)
    found: dict[int, list[float]] = {viewers: [] for viewers in counts}
    for _ in range(ROUNDS):
        for viewers in counts:
            found[viewers].append(_milliseconds(server, viewers))
    for viewers, values in found.items():
        more = statistics.median(values) - statistics.median(found[0])
        print(f"| {label} | {viewers} | {statistics.median(values):.1f} | {more:.1f} |")


def main() -> None:
    """Print a row for each number of viewers."""
    services = int(sys.argv[1]) if len(sys.argv) > 1 else SERVICES
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        server = opened.enter_context(ovms(_configuration(folder, services)))
        print("| calls | viewers | ms of CPU a second | more than without |\n|---|---|---|---|")
        _rows(server, "none")
        ends = threading.Event()
        caller = threading.Thread(target=_call_each_second, args=(server, services, ends))
        caller.start()
        _rows(server, f"{services} services, each once a second")
        ends.set()
        caller.join()


if __name__ == "__main__":
    main()
