"""Text generation when something goes wrong: clients that leave, and an engine that is killed.

Steps and calls are counted, which other work on the machine does not change; the one time is to the last error.
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
"""Seconds that a stream may be silent where others have the cores."""


def _url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.rest}{path}"


def _steps(server: Server) -> float:
    """Give how many steps with texts there have been of the model ``chat``."""
    wanted = 'ovmstrio_llm_step_seconds_count{model_name="chat"} '
    text = httpx.get(_url(server, "/metrics")).text
    return next(float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted))


def _settled(server: Server) -> float:
    """Give the number of steps once there are no more."""
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
    """Leave a stream that is alone after some tokens; gives how many steps more were made than tokens had come."""
    before = _settled(server)
    url = _url(server, "/v3/chat/completions")
    with httpx.stream("POST", url, json=_body("Tell a story.", 1000), timeout=_PATIENCE) as answer:
        for event in _events(answer):
            come = event["usage"]["completion_tokens"]
            if come >= tokens:
                break
    return _settled(server) - before - float(come)


def leaving_clients(server: Server) -> Row:
    """Count the streams that are out of the batch at most one step after the one that their client left in."""
    later = [_left_after(server, 2 + number % 7) for number in range(LEAVING)]
    within = sum(steps <= 1 for steps in later)
    detail = f"at most {max(later):.0f} steps more than tokens were read, {sum(later) / LEAVING:.2f} on average"
    return Row(
        "streams out of the batch within a step of their client's leaving, of 100", within, "100", within == 100, detail
    )


def killed_engine(server: Server) -> list[Row]:
    """Kill the engine under 8 streams, and count what fails elsewhere until it is there again."""
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
        told = max(each.result() for each in streams) - killed
        while httpx.get(_url(server, "/v2/health/ready")).status_code != httpx.codes.OK:
            threading.Event().wait(0.1)
        again = time.perf_counter() - killed
        over.set()
        calls, failed = calling.result()
    what = "kill -9 of the engine under 8 streams"
    detail = f"ready again after {again:.1f} s"
    return [
        Row(f"{what}: seconds until the last of them is told", told, "< 0.2", told < 0.2, detail),
        Row(f"{what}: failed calls of another model", failed, "0", not failed, f"of {calls} calls until then"),
    ]


def is_engine(process: psutil.Process) -> bool:
    """Tell whether a process makes texts; one that has ended does not."""
    try:
        return _ENGINE in process.cmdline()
    except psutil.NoSuchProcess:
        return False
