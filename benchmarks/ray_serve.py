"""A trivial model on Ray Serve: the application of ``ovms deploy ray`` against a hand-written deployment."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import psutil

from benchmarks.against_quart import BODY
from benchmarks.processes import cpu_seconds, ended
from benchmarks.report import Row
from tests.support import ir
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["run"]

CALLS = 400
ROUNDS = 5
LEAST = 0.95
MOST = 1.0
MOST_WITH_INGRESS = 1.5
PATIENCE_SECONDS = 60


class _Round(NamedTuple):
    """Result of one round: calls per second, CPU of the replicas per call, and median latency in milliseconds."""

    rate: float
    cpu_ms: float
    median_ms: float


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run the cluster's process until the block ends; yield the process and its port."""
    ir.save(ir.dummy(), folder, "m")
    entries = [{"name": name, "base_path": str(folder / "m"), "placement": {"num_cpus": 0.1}} for name in ("m", "n")]
    configs = [folder / "one_group.json", folder / "two_groups.json"]
    for number, config in enumerate(configs, 1):
        config.write_text(json.dumps({"model_config_list": [{"config": each} for each in entries[:number]]}))
    (port,) = free_ports(1)
    file = next((folder / "m").rglob("*.xml"))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ray_serve_program", *map(str, configs), str(file), str(port)],
        env=os.environ | {"RAY_TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with ended(process):
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            sys.exit("the cluster did not start")
        yield psutil.Process(process.pid), port
        process.stdin.close()
        process.wait(PATIENCE_SECONDS)


def _replicas(cluster: psutil.Process, application: str) -> list[psutil.Process]:
    title = f"ServeReplica:{application}:"
    return [each for each in cluster.children(recursive=True) if title in " ".join(each.cmdline())]


def _measure(url: str, clients: int, replicas: list[psutil.Process]) -> _Round:
    failures: list[str] = []
    times: list[float] = []

    def call() -> None:
        with httpx.Client(timeout=PATIENCE_SECONDS) as client:
            for _ in range(CALLS // clients):
                sent = time.perf_counter()
                answer = client.post(url, content=BODY, headers={"content-type": "application/json"})
                times.append(time.perf_counter() - sent)
                if answer.status_code != 200:
                    failures.append(answer.text)

    before, begun = sum(map(cpu_seconds, replicas)), time.perf_counter()
    threads = [threading.Thread(target=call) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - begun, sum(map(cpu_seconds, replicas)) - before
    if failures:
        sys.exit(f"not every call succeeded: {failures[0]}")
    return _Round(CALLS / seconds, cpu / CALLS * 1e3, statistics.median(times) * 1e3)


def _summary(rounds: list[_Round]) -> str:
    rate, cpu, median = (statistics.median(column) for column in zip(*rounds, strict=True))
    return f"{rate:.0f}/s, median {median:.1f} ms, {cpu:.2f} ms of CPU in the replicas"


def _rows(cluster: psutil.Process, port: int, clients: int) -> list[Row]:
    replicas = {name: _replicas(cluster, name) for name in ("ours", "groups", "hand")}
    rounds = [
        {
            name: _measure(f"http://127.0.0.1:{port}/{name}/v2/models/m/infer", clients, processes)
            for name, processes in replicas.items()
        }
        for _ in range(ROUNDS + 1)
    ][1:]
    summaries = {name: _summary([each[name] for each in rounds]) for name in replicas}
    detail = f"{summaries['ours']}; by hand {summaries['hand']}"
    title = f"Trivial model on Ray Serve over HTTP, {clients} client{'s'[: clients - 1]}, against a deployment by hand"
    ratio = statistics.median(each["ours"].rate / each["hand"].rate for each in rounds)
    median = statistics.median(each["ours"].median_ms / each["hand"].median_ms for each in rounds)
    cpu = statistics.median(each["groups"].cpu_ms / each["hand"].cpu_ms for each in rounds)
    return [
        Row(title, ratio, f">= {LEAST}", ratio >= LEAST, detail),
        Row(f"{title}: median latency", median, f"<= {MOST:g}", median <= MOST, detail),
        Row(
            f"{title}: CPU with an ingress",
            cpu,
            f"<= {MOST_WITH_INGRESS}",
            cpu <= MOST_WITH_INGRESS,
            summaries["groups"],
        ),
    ]


def run() -> list[Row]:
    """Measure with one client and with four; print a message if Ray is not installed."""
    if find_spec("ray") is None:
        print("ray: skipped, because Ray is not installed: pip install ovmstrio[ray]", file=sys.stderr)
        return []
    # The length of socket paths is limited.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        with _cluster(folder) as (cluster, port):
            return [row for clients in (1, 4) for row in _rows(cluster, port, clients)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
