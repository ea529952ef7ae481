"""Client with a fixed request rate that measures latencies while the server is attacked.

``python -m tests.attacks.neighbour GRPC_PORT REST_PORT MODEL`` calls a trivial model over both interfaces until its
standard input ends, and prints the latencies in milliseconds as JSON. Latencies are measured from the due time, so a
stalled server delays every waiting call. A call without an answer is the last one, and counts with its waiting time.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from benchmarks.requests import framed_infer_request
from tests.attacks.attacked_server import INFER, ROW
from tests.support.bare_http2 import ANSWER_SECONDS, BareConnection, ConnectionEnded

RATE: Final = 100.0
"""Calls a second over each protocol."""


def _grpc_caller(port: int, model: str) -> Callable[[], None]:
    connection, body = BareConnection(port), framed_infer_request(model, "b", ROW)[5:]

    def ask() -> None:
        answer = connection.ask(INFER, body)
        if answer.status != "0":
            sys.exit(f"the neighbour was refused over gRPC: {answer.headers}")

    return ask


def _rest_caller(port: int, model: str) -> Callable[[], None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    tensor = {"name": "b", "shape": [1, 10], "datatype": "FP32", "data": ROW.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]})

    def ask() -> None:
        connection.request("POST", f"/v2/models/{model}/infer", body)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.OK:
            sys.exit(f"the neighbour was refused over REST: {answer.status} {text[:200]!r}")

    return ask


def _call_periodically(ask: Callable[[], None], over: threading.Event, latencies: list[float]) -> None:
    due = time.perf_counter()
    alive = True
    while alive and not over.wait(max(0.0, due - time.perf_counter())):
        try:
            ask()
        except (OSError, ConnectionEnded):
            alive = False
        latencies.append((time.perf_counter() - due) * 1e3)
        due += 1 / RATE


def _main(grpc: int, rest: int, model: str) -> None:
    over, latencies = threading.Event(), list[float]()
    callers = [_grpc_caller(grpc, model), _rest_caller(rest, model)]
    for ask in callers:
        ask()
    threads = [threading.Thread(target=_call_periodically, args=(ask, over, latencies)) for ask in callers]
    for thread in threads:
        thread.start()
    print("started", flush=True)  # noqa: T201 - the parent process waits for this line
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps(latencies))  # noqa: T201 - the output of the program


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
