"""Graphs of one Python node: unary calls against the trivial model, and streams of many small outputs."""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.graph_files import GENERATIVE, REGULAR, add_graphs
from benchmarks.grpc_unary import request_bytes
from benchmarks.models import trivial, write_repository
from benchmarks.processes import Server, h2load, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_bytes_request

__all__ = ["run"]

ROUNDS = 5
CALLS = 10_000
SINGLE_CALLS = 2_000
OUTPUTS = 1_000
STREAMS = 40
OPENINGS = 4_000
IDLE = 1_000
STALLED_OUTPUTS = 200_000
_FRAME = 5


def _count(server: Server, family: str, name: str, method: str) -> float:
    """Read a metric of the server."""
    prefix = f'{family}{{api="KServe",interface="gRPC",method="{method}",name="{name}"}}'
    lines = httpx.get(f"http://127.0.0.1:{server.rest}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(prefix))


def _unary(server: Server, folder: Path) -> list[Row]:
    model, graph = folder / "model.bin", folder / "echo.bin"
    model.write_bytes(request_bytes())
    graph.write_bytes(framed_bytes_request("echo", "in", bytes(40)))
    ratios = []
    for _ in range(ROUNDS + 1):
        theirs = h2load(server.grpc, "ModelInfer", model, calls=CALLS, connections=2, streams=4)
        ours = h2load(server.grpc, "ModelInfer", graph, calls=CALLS, connections=2, streams=4)
        ratios.append((ours / theirs, ours, theirs))
    single = []
    for _ in range(ROUNDS):
        theirs = h2load(server.grpc, "ModelInfer", model, calls=SINGLE_CALLS)
        ours = h2load(server.grpc, "ModelInfer", graph, calls=SINGLE_CALLS)
        single.append(1e3 / ours - 1e3 / theirs)
    answered = _count(server, "ovms_responses", "echo", "ModelInfer")
    if answered != (ROUNDS + 1) * CALLS + ROUNDS * SINGLE_CALLS:
        sys.exit(f"not every call of the graph was answered: {answered}")
    ratio, ours, theirs = (statistics.median(row[i] for row in ratios[1:]) for i in range(3))
    more = statistics.median(single)
    what = "unary call of a graph of one Python node"
    return [
        Row(f"{what}, concurrency 8, against the trivial model", ratio, ">= 0.6", ratio >= 0.6,
            f"{ours:.0f}/s, model {theirs:.0f}/s"),
        Row(f"{what}, concurrency 1, ms more than the model", more, "<= 1.0", more <= 1.0, "mean latency of a call"),
    ]  # fmt: skip


def _streams(server: Server, folder: Path) -> list[Row]:
    body = folder / "count.bin"
    body.write_bytes(framed_bytes_request("count", "in", b"%d" % OUTPUTS))
    opening = folder / "open.bin"
    opening.write_bytes(framed_bytes_request("echo", "in", bytes(40)))
    rates = [h2load(server.grpc, "ModelStreamInfer", body, calls=STREAMS) * OUTPUTS for _ in range(ROUNDS + 1)][1:]
    sent = _count(server, "ovms_responses", "count", "ModelInferStream")
    if sent != (ROUNDS + 1) * STREAMS * OUTPUTS:
        sys.exit(f"not every output was sent: {sent}")
    opened = [
        h2load(server.grpc, "ModelStreamInfer", opening, calls=OPENINGS, connections=2, streams=4)
        for _ in range(ROUNDS)
    ]
    rate, opens = statistics.median(rates), statistics.median(opened)
    return [
        Row("outputs/s of a generative stream, one at a time", rate, ">= 12000", rate >= 12_000,
            f"{OUTPUTS} outputs of a few bytes a stream"),
        Row("streams opened and closed a second", opens, ">= 1000", opens >= 1_000, "one request and one reply each"),
    ]  # fmt: skip


class _Client:
    """Client that can read slowly or not at all."""

    def __init__(self, server: Server) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc}")
        self._open = self.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        self._done = threading.Event()

    def open(self, request: bytes) -> Any:
        """Open a stream with one request that is not half-closed."""

        def requests() -> Any:
            yield request[_FRAME:]
            self._done.wait()

        return self._open(requests())

    def close(self) -> None:
        """End all streams."""
        self._done.set()
        self.channel.close()


def _slow_reader(server: Server) -> Row:
    """Measure the memory of an endless stream whose client does not read."""
    client = _Client(server)
    try:
        replies = client.open(framed_bytes_request("count", "in", b"%d" % STALLED_OUTPUTS))
        next(replies)
        time.sleep(1)
        before = server.resident_mb
        time.sleep(5)
        grown = server.resident_mb - before
    finally:
        client.close()
    return Row(
        "memory while a slow reader stalls a stream, MB in 5 s", grown, "< 1", grown < 1, "after the first second"
    )


def _idle_streams(server: Server) -> Row:
    clients = [_Client(server) for _ in range(10)]
    try:
        before = server.resident_mb
        request = framed_bytes_request("echo", "in", bytes(40))
        held = [client.open(request) for client in clients for _ in range(IDLE // len(clients))]
        for replies in held:
            next(replies)
        grown = server.resident_mb - before
    finally:
        for client in clients:
            client.close()
    return Row(f"{IDLE} idle open streams, MB", grown, "< 100", grown < 100, "growth of resident memory")


def run() -> list[Row]:
    """Measure one server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_repository(folder, {"trivial": trivial()}, {})
        add_graphs(config, {"echo": ("echo.py", REGULAR), "count": ("counting.py", GENERATIVE)})
        with ovms(config, "--metrics_enable") as server:
            return [
                *_unary(server, folder),
                *_streams(server, folder),
                _idle_streams(server),
                _slow_reader(server),
            ]
