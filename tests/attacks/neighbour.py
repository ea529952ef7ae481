"""A client that keeps its own pace and measures what its calls take, while others are served or attack.

``python -m tests.attacks.neighbour GRPC_PORT REST_PORT MODEL`` calls a trivial model over both until its input ends,
and prints the latencies in milliseconds as JSON.  Calls are due at a steady rate, and each is measured from then on, so
that a server that stood still is seen by every call that waited.  A call without an answer is the last one, and
counts as long as it was waited for.
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
from tests.attacks.served import INFER, ROW
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


def _keep_asking(ask: Callable[[], None], over: threading.Event, latencies: list[float]) -> None:
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
    threads = [threading.Thread(target=_keep_asking, args=(ask, over, latencies)) for ask in callers]
    for thread in threads:
        thread.start()
    print("asking", flush=True)  # noqa: T201 - whoever started this waits for it
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps(latencies))  # noqa: T201 - what was asked for


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
