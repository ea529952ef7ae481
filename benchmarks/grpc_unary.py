"""gRPC unary: the trivial model served, against a grpc.aio server with a canned answer, under the same h2load."""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np

from benchmarks.models import trivial, write_repository
from benchmarks.processes import Server, cpu_seconds, h2load, ovms, script
from benchmarks.report import Row
from benchmarks.requests import framed_infer_request
from tests.support.ports import free_ports

ROUNDS = 5
CALLS = 20_000
CONNECTIONS = 4
STREAMS = 8
GOAL = 0.9
STREAMED = 500
"""Number of messages of a canned stream."""
_PAUSE_SECONDS = 0.002  # before each of them


def request_bytes() -> bytes:
    """Build one framed ModelInfer request for the trivial model."""
    return framed_infer_request("trivial", "b", np.arange(10, dtype=np.float32).reshape(1, 10))


def _load(server: Server, body: Path) -> tuple[float, float]:
    """Send load to one server; return calls per second and the server's CPU microseconds per call."""
    before = cpu_seconds(server.process)
    rate = h2load(server.grpc, "ModelInfer", body, calls=CALLS, connections=CONNECTIONS, streams=STREAMS)
    return rate, (cpu_seconds(server.process) - before) / CALLS * 1e6


def _check_all_answered(server: Server, calls: int) -> None:
    """Check the server's counter for failed calls, because the load generator sees only the HTTP status."""
    metrics = httpx.get(f"http://127.0.0.1:{server.rest}/metrics").text
    found = re.search(r'ovms_requests_success{[^}]*interface="gRPC",method="ModelInfer"[^}]*} ([0-9.e+]+)', metrics)
    if found is None or float(found[1]) != calls:
        sys.exit(f"expected {calls} successful calls, the server counted {found and found[1]}")


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_repository(Path(folder), {"trivial": trivial()}, {})
        body = Path(folder) / "request.bin"
        body.write_bytes(request_bytes())
        (port,) = free_ports(1)
        with ovms(config) as ours, script([__file__, str(port)], port) as theirs:
            pairs = [(_load(ours, body), _load(theirs, body)) for _ in range(ROUNDS + 1)][1:]
            _check_all_answered(ours, (ROUNDS + 1) * CALLS)
    ratio = statistics.median(a[0] / b[0] for a, b in pairs)
    ours_rate, ours_cpu = (statistics.median(a[i] for a, _ in pairs) for i in (0, 1))
    theirs_rate, theirs_cpu = (statistics.median(b[i] for _, b in pairs) for i in (0, 1))
    detail = f"{ours_rate:.0f}/s at {ours_cpu:.0f} us CPU, grpc.aio canned {theirs_rate:.0f}/s at {theirs_cpu:.0f} us"
    return [
        Row(
            "gRPC unary, trivial model, concurrency 32, against grpc.aio with a canned answer",
            ratio,
            f">= {GOAL}",
            ratio >= GOAL,
            detail,
        )
    ]


async def _serve_canned(port: int) -> None:
    import grpc  # noqa: PLC0415 - only the child process needs it

    answer = bytes(100)

    async def handler(_request: bytes, _context: object) -> bytes:
        return answer

    async def stream(_requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        for _ in range(STREAMED):
            await asyncio.sleep(_PAUSE_SECONDS)
            yield answer

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> object:
            if details.method.endswith("ModelStreamInfer"):
                return grpc.stream_stream_rpc_method_handler(stream)
            return grpc.unary_unary_rpc_method_handler(handler)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve_canned(int(sys.argv[1])))
