"""CPU and memory of the server: idle, with a thousand idle connections, and after two hundred thousand requests."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx

from benchmarks.against_quart import BODY
from benchmarks.grpc_unary import request_bytes
from benchmarks.models import trivial, write_repository
from benchmarks.processes import Server, need, ovms
from benchmarks.report import Row
from benchmarks.rest_json import PATH

CONNECTIONS = 1_000
MIXED_CALLS = 200_000
BATCH = 10_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def _idle_connections(server: Server) -> float:
    before = server.resident_mb
    held = []
    for _ in range(CONNECTIONS):
        connection = socket.create_connection(("127.0.0.1", server.grpc))
        connection.sendall(PREFACE)
        held.append(connection)
    for connection in held:
        connection.recv(9)
    threading.Event().wait(1)
    grown = server.resident_mb - before
    for connection in held:
        connection.close()
    return grown


def _mixed_batch(server: Server, body: Path) -> None:
    """Send half of the calls over gRPC and half over REST; the server refuses one in fifty REST calls."""
    command = [need("h2load", "nghttp2-client"), "-n", str(BATCH // 2), "-c", "4", "-m", "8", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://127.0.0.1:{server.grpc}/inference.GRPCInferenceService/ModelInfer"
    grpc = subprocess.Popen([*command, url], stdout=subprocess.DEVNULL)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.rest}") as client:
        for number in range(BATCH // 2):
            refused = number % 50 == 0
            answer = client.post(PATH, content=BODY.replace("10]", "11]") if refused else BODY)
            if answer.status_code != (httpx.codes.BAD_REQUEST if refused else httpx.codes.OK):
                sys.exit(f"unexpected answer: {answer.status_code} {answer.text}")
    if grpc.wait() != 0:
        sys.exit("h2load failed")


def _growth(server: Server, body: Path) -> float:
    """Return the growth in percent from the end of the warm-up (a tenth of the calls) to the end."""
    batches = MIXED_CALLS // BATCH
    warm = 0.0
    for number in range(batches):
        _mixed_batch(server, body)
        if number == batches // 10:
            warm = server.resident_mb
    return (server.resident_mb - warm) / warm * 100


def run() -> list[Row]:
    """Measure one server from its start to the end of the soak."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_repository(folder, {"trivial": trivial()}, {})
        body = folder / "request.bin"
        body.write_bytes(request_bytes())
        starts = []
        for _ in range(4):
            with ovms(config) as server:
                starts.append(server.ready_seconds)
        with ovms(config) as server:
            idle = server.resident_mb
            connections = _idle_connections(server)
            growth = _growth(server, body)
    start = sorted(starts)[len(starts) // 2]
    return [
        Row(
            "start to ready with one small model, seconds",
            start,
            "< 1.5",
            start < 1.5,
            "median of 4, until HTTP says so",
        ),
        Row("resident memory when idle, MB", idle, "< 200", idle < 200, "one small model"),
        Row("1,000 idle gRPC connections, MB", connections, "< 50", connections < 50, "growth of resident memory"),
        Row(
            "growth of memory over 200,000 mixed requests, %", growth, "< 2", growth < 2, "gRPC and REST, some refused"
        ),
    ]
