"""Cost and benefit of workers: CPU of a trivial call, a step forwarded to its owner, Python on two cores, memory."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tritonclient.grpc

from benchmarks.calls import CONNECTIONS, STREAMS, call_rate
from benchmarks.processes import Server, cpu_of_tree, ovms
from benchmarks.report import Row
from benchmarks.requests import framed_infer_request
from tests.support import ir

__all__ = ["run"]

CALLS = 2_000
ROUNDS = 5
CLIENTS = 4
SECONDS = 5.0
MOST_CPU = 1.1
MOST_STEP_US = 60
LEAST_GAIN = 1.9

_HANDLER = """
class Handler:
    def handle_post(self, payload):
        return sum(number * number for number in range(100_000))
"""


def _write(folder: Path) -> Path:
    ir.save(ir.dummy(), folder, "dummy")
    ir.save(ir.accumulator(), folder, "acc")
    project = folder / "busy"
    project.mkdir()
    (project / "handler.py").write_text(_HANDLER)
    (project / "nucleus.yaml").write_text("type: python\npath: handler.py\nname: busy\n")
    models = [
        {"name": "dummy", "base_path": str(folder / "dummy")},
        {"name": "acc", "base_path": str(folder / "acc"), "stateful": True},
    ]
    file = folder / "config.json"
    handlers = [{"name": "busy", "path": str(project)}]
    entries = [{"config": model} for model in models]
    file.write_text(json.dumps({"model_config_list": entries, "handler_config_list": handlers}))
    return file


@contextmanager
def _calling(server: Server, name: str, tensor: str, width: int) -> Iterator[Callable[..., Any]]:
    given = tritonclient.grpc.InferInput(tensor, [1, width], "FP32")
    given.set_data_from_numpy(np.ones((1, width), np.float32))
    own = [("grpc.use_local_subchannel_pool", 1)]
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}", channel_args=own) as client:
        yield lambda **options: client.infer(name, [given], **options)


def _cpu_us(server: Server, call: Callable[[], Any]) -> float:
    """Measure the CPU time of all server processes per call."""
    before = cpu_of_tree(server.process)
    for _ in range(CALLS):
        call()
    return (cpu_of_tree(server.process) - before) / CALLS * 1e6


def _trivial(one: Server, two: Server) -> Row:
    with _calling(one, "dummy", "b", 10) as ask_one, _calling(two, "dummy", "b", 10) as ask_two:
        pairs = [(_cpu_us(one, ask_one), _cpu_us(two, ask_two)) for _ in range(ROUNDS)]
    alone, shared = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    detail = f"{shared:.0f} us with --workers 2, {alone:.0f} us with one process"
    return Row("CPU of a trivial call with two workers, ratio", ratio, f"<= {MOST_CPU}", ratio <= MOST_CPU, detail)


def _parallel(one: Server, two: Server, another: Server) -> Row:
    """Compare two workers with two servers: the processes of both compete for the same cores and caches."""
    body = framed_infer_request("dummy", "b", np.ones((1, 10), np.float32))
    rounds = [[_parallel_cpu_us(each, body) for each in ((one,), (two,), (one, another))] for _ in range(ROUNDS + 1)]
    alone, shared, apart = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    ratio = statistics.median(workers / servers for _, workers, servers in rounds[1:])
    return Row(
        f"CPU of a trivial call of {CONNECTIONS * STREAMS} in flight, two workers against two servers",
        ratio,
        f"<= {MOST_CPU}",
        ratio <= MOST_CPU,
        f"{shared:.0f} us with --workers 2, {apart:.0f} us with two servers, {alone:.0f} us with one process",
    )


def _parallel_cpu_us(servers: Sequence[Server], body: bytes) -> float:
    """Measure the CPU time of all server processes per call, with a connection to each server or two to the same."""
    before = sum(cpu_of_tree(each.process) for each in servers)
    call_rate([each.grpc for each in servers], [body], 4 * CALLS)
    return (sum(cpu_of_tree(each.process) for each in servers) - before) / (4 * CALLS) * 1e6


def _steps(one: Server, two: Server) -> list[Row]:
    """Compare steps on the connection of the sequence's start, on one of another worker, and with one process."""
    with ExitStack() as stack:
        ask_one, *asking = (stack.enter_context(_calling(server, "acc", "x", 2)) for server in (one, *[two] * 4))
        by_pid = {_pid(two, ask, identity): ask for identity, ask in enumerate(asking, 2)}
        ask_here, ask_there = by_pid.values()
        for ask in (ask_one, ask_here):
            ask(sequence_id=1, sequence_start=True)
        rounds = [
            [_timed(server, ask) for server, ask in ((one, ask_one), (two, ask_here), (two, ask_there))]
            for _ in range(ROUNDS)
        ]
    (alone, alone_us), (here, here_us), (there, there_us) = (
        tuple(statistics.median(each) for each in zip(*column, strict=True)) for column in zip(*rounds, strict=True)
    )
    own, other = (statistics.median(each[row][0] - each[row - 1][0] for each in rounds) for row in (1, 2))
    latency = f"p50 {here_us:.0f} us, with one process {alone_us:.0f} us"
    return [
        Row(
            "CPU that two workers add to a step on the connection that its sequence began on, us",
            own,
            f"<= {MOST_STEP_US}",
            own <= MOST_STEP_US,
            f"a step takes {here:.0f} us, with one process {alone:.0f} us; {latency}",
        ),
        Row(
            "CPU that a step takes more which comes to another worker, us",
            other,
            f"<= {MOST_STEP_US}",
            other <= MOST_STEP_US,
            f"such a step takes {there:.0f} us; p50 {there_us:.0f} us, on its own connection {here_us:.0f} us",
        ),
    ]


def _pid(server: Server, ask: Callable[..., Any], identity: int) -> int:
    """Find the worker of a connection by its CPU time."""
    workers = server.process.children()
    before = [each.cpu_times().user for each in workers]
    ask(sequence_id=identity, sequence_start=True)
    for _ in range(CALLS // 4):
        ask(sequence_id=identity)
    work = {each.cpu_times().user - known: each.pid for each, known in zip(workers, before, strict=True)}
    return work[max(work)]


def _timed(server: Server, ask: Callable[..., Any]) -> tuple[float, float]:
    """Measure the server's CPU time per step and the median latency, both in us."""
    seconds = []

    def step() -> None:
        begin = time.perf_counter()
        ask(sequence_id=1)
        seconds.append(time.perf_counter() - begin)

    cpu = _cpu_us(server, step)
    return cpu, statistics.median(seconds) * 1e6


def _rate(server: Server) -> float:
    """Return the handler's answers per second, with one connection per client."""
    ends = time.perf_counter() + SECONDS
    answered = [0] * CLIENTS
    with ExitStack() as stack:
        address = f"http://127.0.0.1:{server.rest}"
        clients = [stack.enter_context(httpx.Client(base_url=address, timeout=60)) for _ in range(CLIENTS)]
        for client in clients:
            client.get("/v2/health/live")

        def call(row: int) -> None:
            while time.perf_counter() < ends:
                clients[row].post("/busy", json={}).raise_for_status()
                answered[row] += 1

        threads = [threading.Thread(target=call, args=(row,)) for row in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(answered) / SECONDS


def _python(one: Server, two: Server) -> Row:
    pairs = [(_rate(one), _rate(two)) for _ in range(ROUNDS)]
    gain = statistics.median(after / before for before, after in pairs)
    alone, shared = (statistics.median(each) for each in zip(*pairs, strict=True))
    detail = f"{shared:.0f} a second with --workers 2, {alone:.0f} with one process; clients on the same cores"
    return Row(
        "Handler that computes in Python, two workers, gain", gain, f">= {LEAST_GAIN}", gain >= LEAST_GAIN, detail
    )


def _memory(one: Server, two: Server) -> Row:
    alone, shared = (_proportional_mb(server.process) for server in (one, two))
    parent = float(two.process.memory_full_info().pss) / 1e6
    detail = f"{shared:.0f} MB of two workers and their parent ({parent:.0f} MB), {alone:.0f} MB of one process (PSS)"
    return Row("Memory of two workers, ratio", shared / alone, "", True, detail)


def _proportional_mb(process: psutil.Process) -> float:
    every = [process, *process.children(recursive=True)]
    return sum(float(each.memory_full_info().pss) for each in every) / 1e6


def run() -> list[Row]:
    """Measure servers of one process and of two, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        file = _write(Path(folder))
        with ovms(file) as one, ovms(file, "--workers", "2") as two:
            with ovms(file) as another:
                parallel = _parallel(one, two, another)
            return [_trivial(one, two), parallel, *_steps(one, two), _python(one, two), _memory(one, two)]
