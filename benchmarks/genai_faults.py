"""Text generation with faults: client disconnects, and a killed engine.

Steps and calls are counted, so other load on the machine does not change them; the only time is to the last error.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.processes import Server

__all__ = ["is_engine", "killed_engine", "leaving_clients"]

LEAVING = 100
STREAMS = 8
_ENGINE = "ovmstrio.inference.engine"
_PATIENCE = 120
"""Maximum seconds without a token while other processes use the cores."""


def _url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.rest}{path}"


def _steps(server: Server) -> float:
    """Return the number of batch steps of the model ``chat``."""
    wanted = 'ovmstrio_llm_step_seconds_count{model_name="chat"} '
    text = httpx.get(_url(server, "/metrics")).text
    return next(float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted))


def _settled(server: Server) -> float:
    """Wait until the steps stop, and return their number."""
    before = -1.0
    while (now := _steps(server)) != before:
        before = now
        threading.Event().wait(0.3)
    return now


def _body(text: str, tokens: int) -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": text}]
    more = {"ignore_eos": True, "temperature": 0, "stream": True, "stream_options": options}
    return {"model": "chat", "messages": messages, "max_tokens": tokens, **more}


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _left_after(server: Server, tokens: int) -> float:
    """Close the only stream after some tokens; return the number of steps beyond the received tokens."""
    before = _settled(server)
    url = _url(server, "/v3/chat/completions")
    with httpx.stream("POST", url, json=_body("Tell a story.", 1000), timeout=_PATIENCE) as answer:
        for event in _events(answer):
            come = event["usage"]["completion_tokens"]
            if come >= tokens:
                break
    return _settled(server) - before - float(come)


def leaving_clients(server: Server) -> Row:
    """Count the streams that leave the batch at most one step after the disconnect of their client."""
    later = [_left_after(server, 2 + number % 7) for number in range(LEAVING)]
    within = sum(steps <= 1 for steps in later)
    detail = f"at most {max(later):.0f} steps more than tokens were read, {sum(later) / LEAVING:.2f} on average"
    return Row(
        "streams out of the batch within a step of their client's leaving, of 100", within, "100", within == 100, detail
    )


def killed_engine(server: Server) -> list[Row]:
    """Kill the engine of 8 streams, and count failures of other calls until it has restarted."""
    (engine,) = (each for each in server.process.children() if is_engine(each))
    begun, over = threading.Barrier(STREAMS + 1), threading.Event()

    def stream(number: int) -> float:
        url = _url(server, "/v3/chat/completions")
        with httpx.stream("POST", url, json=_body(f"Story {number}", 2000), timeout=_PATIENCE) as answer:
            for place, event in enumerate(_events(answer)):
                if place == 1:
                    begun.wait()
                if "error" in event:
                    return time.perf_counter()
        return float("inf")

    def call() -> tuple[int, int]:
        body = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [0.5] * 10}]}
        calls = failed = 0
        with httpx.Client(timeout=30) as client:
            while not over.is_set():
                calls += 1
                failed += client.post(_url(server, "/v2/models/trivial/infer"), json=body).status_code != httpx.codes.OK
        return calls, failed

    with ThreadPoolExecutor(STREAMS + 1) as pool:
        calling = pool.submit(call)
        streams = [pool.submit(stream, number) for number in range(STREAMS)]
        begun.wait()
        killed = time.perf_counter()
        os.kill(engine.pid, signal.SIGKILL)
        delay = max(each.result() for each in streams) - killed
        while httpx.get(_url(server, "/v2/health/ready")).status_code != httpx.codes.OK:
            threading.Event().wait(0.1)
        again = time.perf_counter() - killed
        over.set()
        calls, failed = calling.result()
    what = "kill -9 of the engine under 8 streams"
    detail = f"ready again after {again:.1f} s"
    return [
        Row(f"{what}: seconds until the last client gets the error", delay, "< 0.2", delay < 0.2, detail),
        Row(f"{what}: failed calls of another model", failed, "0", not failed, f"of {calls} calls until then"),
    ]


def is_engine(process: psutil.Process) -> bool:
    """Return whether a process is a running engine."""
    try:
        return _ENGINE in process.cmdline()
    except psutil.NoSuchProcess:
        return False
