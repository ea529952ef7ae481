"""Text generation in the engine process: cost of a token, effect on other calls, benefit of a warm prefix cache.

Every figure is a ratio of two alternating measurements: against a bare batch of the same library in one process,
against its pipeline that generates texts in sequence, and against the same server without text generation.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.genai_faults import is_engine, killed_engine, leaving_clients
from benchmarks.genai_poison import poisoned_step
from benchmarks.models import trivial, write_repository
from benchmarks.processes import Server, cpu_of_tree, cpu_seconds, ovms
from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["TOKENS", "ask", "run", "served"]

STREAMS = 8
TOKENS = 64
ROUNDS = 5
CALLS = 400
PREFIX_WORDS = 700
ASKED = [f"Tell a long story about a lighthouse keeper and {number} gulls." for number in range(STREAMS)]
_LONG = 128
_SERVER_MICROSECONDS = {1: 300, STREAMS: 100}
_THREADS = {"INFERENCE_NUM_THREADS": 1}


# The library alone, in a separate process


def _bare(folder: str) -> None:
    """Print tokens per second of CPU, of 8 texts in one batch or one after the other, at each line of the input."""
    import openvino_genai as genai  # noqa: PLC0415 - only this part of the benchmark needs it

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    batch = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", _THREADS)
    alone: Any = None
    config = batch.get_config()
    config.max_new_tokens, config.ignore_eos, config.do_sample = TOKENS, True, False
    numbers = iter(range(1, 10**9))
    for line in sys.stdin:
        started = time.process_time()
        if line.strip() == "batch":
            handles = [batch.add_request(next(numbers), text, config) for text in ASKED]
            while batch.has_non_finished_requests():
                batch.step()
                for handle in handles:
                    while handle.can_read():
                        handle.read()
        else:
            if alone is None:
                alone = genai.LLMPipeline(folder, "CPU", **_THREADS)
                started = time.process_time()
            for text in ASKED:
                alone.generate(text, config)
        print(STREAMS * TOKENS / (time.process_time() - started), flush=True)


@contextmanager
def _bare_runs(folder: Path) -> Iterator[Callable[[str], float]]:
    """Start a process that measures the library on request."""
    command = [sys.executable, "-m", "benchmarks.genai", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        to, out = process.stdin, process.stdout
        assert to is not None
        assert out is not None

        def rate(how: str) -> float:
            to.write(f"{how}\n")
            to.flush()
            return float(out.readline())

        yield rate
        to.close()


# The server


def served(repository: Path, *, sleeps: bool = True) -> tuple[Path, Path]:
    """Write the real model, a trivial one, and a copy of the real one that ``sleeps`` when idle.

    Return the configuration and the model's folder.
    """
    prepare = [sys.executable, "-m", "ovmstrio.cli", "prepare", "--sample", "chat", "--repository", str(repository)]
    subprocess.run(prepare, check=True, capture_output=True)
    folder = repository / "chat"
    (folder / "generation_config.json").unlink()  # a repetition penalty would be work that other servers lack
    config = write_repository(repository, {"trivial": trivial()}, {})
    document = json.loads(config.read_text())
    model = {"base_path": str(folder), "task": "text_generation", "plugin_config": _THREADS, "cache_size": 1}
    entries = [{"name": "chat", **model}]
    if sleeps:
        entries.append({"name": "idle", **model, "idle_unload_seconds": 1})
    document["text_model_config_list"] = [{"config": entry} for entry in entries]
    config.write_text(json.dumps(document))
    return config, folder


def ask(port: int, text: str, tokens: int = TOKENS, model: str = "chat") -> float:
    """Stream a text to its end and return the time to the first token in seconds."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "temperature": 0}
    started, first = time.perf_counter(), 0.0
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            first = first or (time.perf_counter() - started if '"content":' in line else 0.0)
    return first


def _tokens_a_second(server: Server) -> float:
    """Return tokens per CPU second of 8 concurrent streams, for server and engine together."""
    before = cpu_of_tree(server.process)
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda text: ask(server.rest, text), ASKED))
    return STREAMS * TOKENS / (cpu_of_tree(server.process) - before)


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
        for text in ASKED:
            pool.submit(keep, text)
        try:
            yield
        finally:
            over.set()


# Rows


def _costs(server: Server, bare: Callable[[str], float]) -> list[Row]:
    _tokens_a_second(server), bare("batch"), bare("alone")
    runs = [(_tokens_a_second(server), bare("batch"), bare("alone")) for _ in range(ROUNDS)]
    ours, batch, alone = (statistics.median(run[index] for run in runs) for index in range(3))
    detail = f"tokens per second of CPU: {ours:.0f}, bare batch {batch:.0f}, one after the other {alone:.0f}"
    to_batch = statistics.median(run[0] / run[1] for run in runs)
    to_alone = statistics.median(run[0] / run[2] for run in runs)
    return [
        Row("text generation, 8 streams, against a bare batch", to_batch, ">= 0.85", to_batch >= 0.85, detail),
        Row("text generation, 8 streams, against one after the other", to_alone, ">= 3", to_alone >= 3, detail),
    ]


def _server_costs(server: Server) -> list[Row]:
    """Return the CPU of the server process per token; the engine is another process."""
    rows = []
    for streams, most in _SERVER_MICROSECONDS.items():
        costs = []
        for _ in range(ROUNDS):
            before = cpu_seconds(server.process)
            with ThreadPoolExecutor(streams) as pool:
                list(pool.map(lambda text: ask(server.rest, text, _LONG), ASKED[:streams]))
            costs.append((cpu_seconds(server.process) - before) / (streams * _LONG) * 1e6)
        cost = statistics.median(costs)
        what = f"server CPU per streamed token, {streams} stream{'s' if streams > 1 else ''}"
        detail = f"us, from {min(costs):.0f} to {max(costs):.0f}, with the requests and the idle server"
        rows.append(Row(what, cost, f"<= {most}", cost <= most, detail))
    return rows


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
    """Measure one server."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        config, folder = served(Path(name))
        bare = stack.enter_context(_bare_runs(folder))
        server = stack.enter_context(ovms(config))
        rows = [
            *_costs(server, bare),
            *_server_costs(server),
            *_neighbours(server),
            _warm_prefix(server),
            _idle_unload(server),
        ]
        return [*rows, leaving_clients(server), *killed_engine(server), *poisoned_step(folder)]


if __name__ == "__main__":
    _bare(sys.argv[1])
