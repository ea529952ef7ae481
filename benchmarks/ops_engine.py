"""Ops: cost of a chain of trivial Ops, and benefit of batching."""

from __future__ import annotations

import contextlib
import statistics
import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks.processes import h2load, median_ms, script
from benchmarks.report import Row
from ovmstrio.encoding.messages import REQUEST, RESPONSE
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["run"]

ROUNDS = 5
CALLS = 2_000
JOINED_CALLS = 2_000
CONNECTIONS = 4
STREAMS = 16
BATCH = 16
CHAIN_GOAL_MS = 1.5
BATCH_GOAL = 3.0
SERVICE = "baidu.paddle_serving.pipeline_serving.PipelineService"

_SERVICE = """
import trio
from ovmstrio.ext.ops import Op, WebService


class Trivial(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        return {{"x": given["x"]}}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {{"x": fetch_data["x"]}}, None, ""


class Costly(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        return {{"x": [given["x"]]}}, False, None, ""

    async def process(self, feed_batch, typical_logid):
        rows = feed_batch[0]["x"]
        await trio.sleep(0.005 * (1 + 3 * (len(rows) - 1) / 15))
        return {{"x": rows}}, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {{"x": fetch_data["x"][0]}}, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        op = read_op
        for number in range({count}):
            op = {op}(name="op%d" % number, input_ops=[op])
        return op


service = Service(name="service")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""

_CONFIG = """
rpc_port: {port}
http_port: {http_port}
worker_num: 64
logging: {{enabled: false}}
op:
  op0: {{batch_size: {batch}, auto_batching_timeout: 20}}
"""


def _request() -> bytes:
    return bytes(REQUEST(key=["x"], value=["text"]).SerializeToString())


def _check(port: int) -> None:
    """Check that calls are answered correctly, because the load generator does not."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = RESPONSE.FromString(channel.unary_unary(f"/{SERVICE}/inference")(_request(), timeout=10))
    if answer.err_no or list(answer.value) != ["text"]:
        sys.exit(f"the pipeline answered wrongly: {answer}")


@contextlib.contextmanager
def _served(folder: Path, op: str, count: int = 1, batch: int = 1) -> Iterator[int]:
    """Serve a pipeline with a number of Ops of one kind; yield the port of its gRPC service."""
    port, http_port = free_ports(2)
    folder.mkdir()
    config, service = folder / "config.yml", folder / "web_service.py"
    config.write_text(_CONFIG.format(port=port, http_port=http_port, batch=batch))
    service.write_text(_SERVICE.format(op=op, count=count))
    command = ["-m", "ovmstrio.cli", "paddle", "run", str(service), "-c", str(config)]
    with script(command, port, quiet=True, folder=folder):
        _check(port)
        yield port


def _chain(folder: Path, body: Path) -> Row:
    with _served(folder / "chain", "Trivial", 5) as port:
        times = [median_ms(port, "inference", body, calls=CALLS, service=SERVICE) for _ in range(ROUNDS + 1)]
    took = statistics.median(times[1:])
    what = "chain of 5 trivial Ops in threads, gRPC, concurrency 1, median in ms"
    return Row(what, took, f"< {CHAIN_GOAL_MS:g}", took < CHAIN_GOAL_MS, f"rounds from {min(times[1:]):.2f} ms")


def _batches(folder: Path, body: Path) -> Row:
    rates: dict[int, list[float]] = {1: [], BATCH: []}
    with (
        _served(folder / "single", "Costly") as single,
        _served(folder / "joined", "Costly", batch=BATCH) as joined,
    ):
        for _ in range(ROUNDS + 1):
            for size, port, calls in ((1, single, JOINED_CALLS // 4), (BATCH, joined, JOINED_CALLS)):
                rate = h2load(
                    port, "inference", body, calls=calls, connections=CONNECTIONS, streams=STREAMS, service=SERVICE
                )
                rates[size].append(rate)
    ratio = statistics.median(b / a for a, b in zip(rates[1][1:], rates[BATCH][1:], strict=True))
    plain, together = (statistics.median(rates[size][1:]) for size in (1, BATCH))
    what = f"auto-batching of {BATCH}, 64 clients, an Op whose batch costs 4 times a sample, against batches of 1"
    detail = f"{together:.0f}/s joined, {plain:.0f}/s without"
    return Row(what, ratio, f">= {BATCH_GOAL:g}", ratio >= BATCH_GOAL, detail)


def run() -> list[Row]:
    """Measure services that the command line serves."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        body = folder / "request.bin"
        request = _request()
        body.write_bytes(struct.pack(">BI", 0, len(request)) + request)
        return [_chain(folder, body), _batches(folder, body)]
