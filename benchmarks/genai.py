"""Text generation in the engine process: cost of tokens and loads, effect on other calls, warm prefixes, and faults.

Every figure is a ratio of alternating measurements: against llama.cpp, against a bare batch of the same library in one
process, against its pipeline that generates texts in sequence, and against the same server without text generation.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.genai_bare import bare_runs
from benchmarks.genai_faults import is_engine, killed_engine, leaving_clients
from benchmarks.genai_llama import (
    compared_first_tokens,
    compared_loads,
    compared_rates,
    llama,
    sample_gguf,
    server_cpu,
)
from benchmarks.genai_poison import poisoned_step
from benchmarks.genai_streams import Target, ask, prompts, served
from benchmarks.processes import Server, cpu_of_tree, ovms
from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["run"]

STREAMS = 8
ROUNDS = 5
CALLS = 400
PREFIX_WORDS = 700


def _slowest(server: Server, path: str) -> float:
    """Return the p99 latency of sequential calls in milliseconds."""
    body = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [0.5] * 10}]}
    times = []
    with httpx.Client(base_url=f"http://127.0.0.1:{server.rest}") as client:
        for _ in range(CALLS):
            started = time.perf_counter()
            client.get(path).raise_for_status() if path.endswith("ready") else client.post(path, json=body)
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.quantiles(times, n=100)[98]


@contextmanager
def _generating(server: Server) -> Iterator[None]:
    """Keep 8 streams busy."""
    over = threading.Event()

    def keep(text: str) -> None:
        while not over.is_set():
            ask(server.rest, text)

    with ThreadPoolExecutor(STREAMS) as pool:
        for text in prompts(STREAMS):
            pool.submit(keep, text)
        try:
            yield
        finally:
            over.set()


# Rows


def _against_sequence(server: Target, bare: Callable[[int | str], float]) -> Row:
    runs = [(server.tokens_per_second(STREAMS), bare("alone")) for _ in range(ROUNDS)]
    ours, alone = (statistics.median(run[index] for run in runs) for index in range(2))
    ratio = statistics.median(run[0] / run[1] for run in runs)
    detail = f"tokens per second of CPU: {ours:.0f}, one after the other {alone:.0f}"
    return Row("text generation, 8 streams, against one after the other", ratio, ">= 3", ratio >= 3, detail)


def _neighbours(server: Server) -> list[Row]:
    rows = []
    for what, path in (("health", "/v2/health/ready"), ("a trivial model", "/v2/models/trivial/infer")):
        ratios = []
        for _ in range(ROUNDS):
            idle = _slowest(server, path)
            with _generating(server):
                busy = _slowest(server, path)
            ratios.append((busy / idle, busy, idle))
        ratio, busy, idle = (statistics.median(each[index] for each in ratios) for index in range(3))
        detail = f"{busy:.2f} ms, idle {idle:.2f} ms, 99th of {CALLS} calls over REST"
        rows.append(Row(f"p99 of {what} while 8 streams generate, against idle", ratio, "<= 3", ratio <= 3, detail))
    return rows


def _warm_prefix(server: Server) -> Row:
    ratios = []
    for number in range(ROUNDS):
        text = " ".join(f"word{number}x{place}" for place in range(PREFIX_WORDS // 4))
        costs = []
        for last in ("first", "second"):
            before = cpu_of_tree(server.process)
            ask(server.rest, f"{text} {last}", tokens=1)
            costs.append(cpu_of_tree(server.process) - before)
        ratios.append((costs[1] / costs[0], *costs))
    ratio, cold, warm = (statistics.median(each[index] for each in ratios) for index in range(3))
    detail = f"{warm:.3f} s of CPU, cold {cold:.3f} s"
    return Row(
        "CPU to the first token behind a warm prefix, against a cold one", ratio, "<= 0.15", ratio <= 0.15, detail
    )


def _idle_unload(server: Server) -> Row:
    def engines() -> int:
        return sum(map(is_engine, server.process.children()))

    memory = []
    for _ in range(ROUNDS + 1):
        ask(server.rest, "Hi", tokens=4, model="idle")
        deadline = time.monotonic() + 30
        while engines() > 1 and time.monotonic() < deadline:
            threading.Event().wait(0.1)
        memory.append(server.resident_mb)
    ratio = memory[-1] / memory[0]
    detail = f"{memory[0]:.0f} MB after one load and unload, {memory[-1]:.0f} MB after {ROUNDS} more"
    return Row("memory of the server after cycles of idle unload, against one", ratio, "<= 1.02", ratio <= 1.02, detail)


def run() -> list[Row]:
    """Measure one server, and compare it with llama.cpp and the library alone."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        root = Path(name)
        config, folder = served(root / "repository")
        gguf = sample_gguf(root / "gguf")
        (root / "loads").mkdir()
        rows = compared_loads(gguf, folder, root / "loads")
        server = stack.enter_context(ovms(config))
        target = Target(server.process, server.rest)
        with llama(gguf) as peer, bare_runs(folder) as bare:
            rows += [*compared_rates(target, peer, bare), *compared_first_tokens(target, peer)]
            rows += [*server_cpu(target), _against_sequence(target, bare)]
        rows += [*_neighbours(server), _warm_prefix(server), _idle_unload(server)]
        return [*rows, leaving_clients(server), *killed_engine(server), *poisoned_step(folder)]
