"""Measurement of an attack on a server: latency of a concurrent client, CPU time and memory of the server."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from benchmarks.requests import framed_infer_request
from tests.attacks.attacked_server import BIG, INFER, TRIVIAL, Ports, write_attacked
from tests.attacks.attacks import ATTACKS
from tests.support.bare_http2 import BareConnection
from tests.support.processes import serving

WARM_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 5.0
SHORTEST_SECONDS: Final = 3.0
ATTACK_SECONDS: Final = 180.0
SETTLE_SECONDS: Final = 30.0
REQUESTS: Final = 16
SAMPLE_SECONDS: Final = 0.05
GROWTH: Final = 1.1
"""Largest memory of a server after an attack, in multiples of its memory before."""


@dataclass(frozen=True, slots=True)
class Latencies:
    p50: float
    p99: float
    slowest: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Latencies:
        p50, p99, slowest = (float(each) for each in np.percentile(values, [50, 99, 100]))
        return cls(p50, p99, slowest, len(values))

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p99:.1f} / {self.slowest:.1f}"


@dataclass(frozen=True, slots=True)
class Measurement:
    attack: str
    outcome: str
    quiet: Latencies
    attacked: Latencies
    seconds: float
    cpu_seconds: float
    before_mb: float
    peak_mb: float
    after_mb: float

    @property
    def delay_ms(self) -> float:
        return self.attacked.p99 - self.quiet.p99

    @property
    def growth(self) -> float:
        return self.after_mb / self.before_mb

    @property
    def kept(self) -> float:
        return (self.after_mb - self.before_mb) / max(1.0, self.peak_mb - self.before_mb)


class Watch:
    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)
        self._over = threading.Event()
        self.peak_mb = 0.0

    def _family(self) -> list[psutil.Process]:
        return [self._server, *self._server.children(recursive=True)]

    @property
    def resident_mb(self) -> float:
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss / 1e6
        return total

    @property
    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        ended = self._server.cpu_times()
        return total + ended.children_user + ended.children_system

    @contextlib.contextmanager
    def peaks(self) -> Iterator[None]:
        sampler = threading.Thread(target=self._sample)
        sampler.start()
        try:
            yield
        finally:
            self._over.set()
            sampler.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.peak_mb = max(self.peak_mb, self.resident_mb)

    def settled_mb(self, goal: float) -> float:
        ends = time.monotonic() + SETTLE_SECONDS
        while (now := self.resident_mb) > goal and time.monotonic() < ends:
            threading.Event().wait(0.1)
        return now


@contextlib.contextmanager
def neighbour(ports: Ports, latencies: list[float], *, model: str = TRIVIAL) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.attacks.neighbour", *map(str, ports), model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n", "the neighbour did not start"
            yield
            output, _ = process.communicate(timeout=ATTACK_SECONDS)
            assert process.returncode == 0, "the neighbour was refused"
            latencies += json.loads(output)
        finally:
            process.kill()


def _listen(ports: Ports, seconds: float) -> Latencies:
    latencies: list[float] = []
    with neighbour(ports, latencies):
        threading.Event().wait(seconds)
    return Latencies.of(latencies)


def _use_all_requests(ports: Ports) -> None:
    body = framed_infer_request(BIG, "x", np.ones(1, np.float32))
    with BareConnection(ports.grpc) as connection:
        streams = [connection.begin(INFER, body) for _ in range(REQUESTS)]
        connection.send(b"".join(data for _, data in streams))
        for stream, _ in streams:
            assert connection.wait(stream).status == "0"


def _send_compressed(ports: Ports) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", ports.rest, timeout=ATTACK_SECONDS)) as connection:
        connection.request("POST", f"/v2/models/{TRIVIAL}/infer", gzip.compress(b"{}"), headers)
        with connection.getresponse() as answer:
            assert answer.status == http.client.BAD_REQUEST, answer.status


def _attack(name: str, ports: Ports) -> tuple[str, float]:
    command = ["nice", sys.executable, "-m", "tests.attacks.attacks", name, *map(str, ports)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=ATTACK_SECONDS, check=False)
    seconds = time.monotonic() - started
    threading.Event().wait(max(0.0, SHORTEST_SECONDS - seconds))
    output = (done.stdout or done.stderr).strip().splitlines()
    return output[-1] if output else "", seconds


def measure(name: str, folder: Path, *, quiet_seconds: float = QUIET_SECONDS) -> Measurement:
    attack = ATTACKS[name]
    config = write_attacked(folder, graph_keys=attack.graph_keys)
    options = ["--config_path", str(config), *attack.options]
    with serving(*options, log=folder / "log") as server:
        ports = Ports(int(server.grpc.rpartition(":")[2]), int(server.rest.rpartition(":")[2]))
        _listen(ports, WARM_SECONDS)
        _use_all_requests(ports)
        _send_compressed(ports)
        quiet = _listen(ports, quiet_seconds)
        watch = Watch(server.process.pid)
        before, cpu = watch.resident_mb, watch.cpu_seconds
        latencies: list[float] = []
        with watch.peaks(), neighbour(ports, latencies):
            outcome, seconds = _attack(name, ports)
        attacked = Latencies.of(latencies)
        used = watch.cpu_seconds - cpu
        after = watch.settled_mb(before * GROWTH)
        return Measurement(name, outcome, quiet, attacked, seconds, used, before, watch.peak_mb, after)
