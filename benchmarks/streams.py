"""Cost of an output of one stream, and of eight concurrent streams over one connection.

Outputs of ``ticks`` come one by one, as those of most generators do; the others are ready faster than they are sent.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import numpy as np

from benchmarks.graph_files import GENERATIVE, add_graphs
from benchmarks.grpc_unary import STREAMED as OUTPUTS
from benchmarks.grpc_unary import request_bytes
from benchmarks.models import trivial, write_repository
from benchmarks.peers.servers import peer
from benchmarks.processes import cpu_seconds, h2load, ovms, script
from benchmarks.report import Row
from benchmarks.requests import framed_bytes_request, framed_infer_request
from ovmstrio.isolation.compat_path import add_compat_path
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from benchmarks.peers.servers import Peer
    from benchmarks.processes import Server

__all__ = ["run"]

STREAMS: Final = 8
ROUNDS: Final = 5
_ONE_THREAD: Final = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1"}
_GRAPHS: Final = {
    "count": ("counting.py", GENERATIVE),
    "inferences": ("inferring.py", GENERATIVE),
    "ticks": ("ticking.py", GENERATIVE),
}
_MOST_MICROSECONDS: Final = 150.0
_KINDS: Final = {
    "count": "a generator of a few bytes",
    "inferences": "a generator of inferences",
    "requests": "requests to a model",
}


_LEAST_OF_MLSERVER: Final = 4.0


def _ask(server: Server | Peer, body: Path, at_once: int, calls: int = STREAMS) -> tuple[float, float]:
    """Return CPU microseconds per output, and outputs per second."""
    before = cpu_seconds(server.process)
    rate = h2load(server.grpc, "ModelStreamInfer", body, calls=calls, streams=at_once)
    return (cpu_seconds(server.process) - before) / (calls * OUTPUTS) * 1e6, rate * OUTPUTS


def _row(server: Server, body: Path) -> Row:
    ask = partial(_ask, server, body)
    ask(8)
    rounds = [(*ask(1), *ask(8)) for _ in range(ROUNDS)]
    alone, rate_alone, together, rate_together = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(each[2] / each[0] for each in rounds)
    detail = f"{together:.0f} us of CPU, {rate_together:.0f}/s; one stream {alone:.0f} us, {rate_alone:.0f}/s"
    what = f"CPU an output of eight streams at once, {_KINDS[body.stem]}, against one"
    return Row(what, ratio, "<= 1", ratio <= 1, detail)


def _messages(server: Server, body: Path, streams: int) -> float:
    """Return CPU microseconds per output of ``ticks`` over gRPC, or of a canned stream."""
    return _ask(server, body, streams, calls=streams)[0]


def _events(server: Server, streams: int) -> float:
    """Return CPU microseconds per output of ``ticks`` over KServe's generate_stream."""

    def read(_: int) -> None:
        url = f"http://127.0.0.1:{server.rest}/v2/models/ticks/generate_stream"
        httpx.post(url, json={"in": str(OUTPUTS)}, timeout=60).raise_for_status()

    before = cpu_seconds(server.process)
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(read, range(streams)))
    return (cpu_seconds(server.process) - before) / (streams * OUTPUTS) * 1e6


def _bare(streams: int) -> float:
    """Return CPU microseconds per output of the generator of ``ticks`` in threads of this process."""
    add_compat_path()
    from benchmarks.handlers.ticking import OvmsPythonModel  # noqa: PLC0415 - imports pyovms
    from pyovms import Tensor  # noqa: PLC0415 - found on the path now

    def generate() -> None:
        for _ in OvmsPythonModel().execute([Tensor("in", b"%d" % OUTPUTS)]):
            pass

    threads = [threading.Thread(target=generate) for _ in range(streams)]
    before = time.process_time()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return (time.process_time() - before) / (streams * OUTPUTS) * 1e6


def _beyond_generator(server: Server, canned: Server, body: Path) -> list[Row]:
    """Return the CPU that the server adds to an output that comes alone, by interface and number of streams."""
    rows = []
    for streams in (1, STREAMS):
        costs = {
            "gRPC": partial(_messages, server, body, streams),
            "generate_stream": partial(_events, server, streams),
        }
        for interface, cost in costs.items():
            cost()
            rounds = [(cost(), _bare(streams), _messages(canned, body, streams)) for _ in range(ROUNDS)]
            beyond = statistics.median(ours - bare for ours, bare, _ in rounds)
            bare, others = (statistics.median(each[place] for each in rounds) for place in (1, 2))
            detail = f"us; the generator alone {bare:.0f} us, a canned stream of grpc.aio {others:.0f} us"
            number = "1 stream" if streams == 1 else f"{streams} streams"
            what = f"CPU per output beyond the generator, outputs one by one over {interface}, {number}"
            is_met = beyond <= _MOST_MICROSECONDS
            rows.append(Row(what, beyond, f"<= {_MOST_MICROSECONDS:g}", is_met, detail))
    return rows


def _against_mlserver(server: Server, folder: Path, config: Path) -> list[Row]:
    """Compare outputs per second with MLServer's, with a generator of inferences in both server processes."""
    asked = folder / "mlserver.bin"
    asked.write_bytes(framed_infer_request("trivial", "b", np.full((1, 10), OUTPUTS, np.float32)))
    with peer("mlserver", config, {"trivial": folder / "trivial" / "1" / "model.xml"}, _ONE_THREAD) as other:
        sides: list[tuple[Server | Peer, Path]] = [(server, folder / "inferences.bin"), (other, asked)]
        taken = {
            number: [[_ask(each, body, number)[1] for each, body in sides] for _ in range(ROUNDS + 1)][1:]
            for number in (1, STREAMS)
        }
    return [_concurrent_row(number, rounds) for number, rounds in taken.items()]


def _concurrent_row(number: int, rounds: list[list[float]]) -> Row:
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    what = f"outputs/s of {'one stream' if number == 1 else f'{number} streams'} of inferences, against MLServer"
    return Row(what, ratio, f">= {_LEAST_OF_MLSERVER:g}", ratio >= _LEAST_OF_MLSERVER, f"{ours:.0f}/s, {theirs:.0f}/s")


def run() -> list[Row]:
    """Measure one server and MLServer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_repository(folder, {"trivial": trivial()}, {})
        add_graphs(config, _GRAPHS)
        bodies = {graph: framed_bytes_request(graph, "in", b"%d" % OUTPUTS) for graph in _GRAPHS}
        bodies["requests"] = request_bytes() * OUTPUTS
        for kind, body in bodies.items():
            (folder / f"{kind}.bin").write_bytes(body)
        with ovms(config) as server:
            rows = [_row(server, folder / f"{kind}.bin") for kind in _KINDS]
            (port,) = free_ports(1)
            with script(["benchmarks/grpc_unary.py", str(port)], port, quiet=True) as canned:
                rows += _beyond_generator(server, canned, folder / "ticks.bin")
            return [*rows, *_against_mlserver(server, folder, config)]
