"""Calls with long errors or answers, more calls than a service takes, and calls that hold the interpreter."""

from __future__ import annotations

import http.client
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.requests import framed_bytes_request
from tests.attacks.served import INFER, SLEEPER, Ports
from tests.support.bare_http2 import BareConnection, ConnectionEnded

CLIENTS: Final = 40
CALLS: Final = 50
PAUSE_SECONDS: Final = 0.05
SEARCHES: Final = 2
PATTERN: Final = b"(a+)+$"


def _call_often(ports: Ports) -> Counter[str]:
    outcomes = Counter[str]()
    connection = http.client.HTTPConnection("127.0.0.1", ports.rest, timeout=30)
    for _ in range(CALLS):
        connection.request("POST", f"/{SLEEPER}", "[1]")
        answer = connection.getresponse()
        answer.read()
        outcomes[str(answer.status)] += 1
        time.sleep(PAUSE_SECONDS)
    return outcomes


def overload(ports: Ports) -> str:
    """Call a service that takes eight calls at once with forty clients, which soon come again."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        counts = sum(pool.map(_call_often, [ports] * CLIENTS), Counter[str]())
    return "answers " + ", ".join(f"{count} of {status}" for status, count in sorted(counts.items()))


def long_searches(ports: Ports) -> str:
    """Have a node search with an expression that takes exponential time, twice, with deadlines of two seconds."""
    said = []
    for _ in range(SEARCHES):
        with BareConnection(ports.grpc, timeout=120) as connection:
            body = framed_bytes_request("long_search", "in", PATTERN)[5:]
            try:
                said.append(connection.ask(INFER, body, [("grpc-timeout", "2S")]).status)
            except ConnectionEnded:
                said.append("none")
    return "status " + ", ".join(said)


def _ask(ports: Ports, graph: str, times: int) -> str:
    said = []
    for _ in range(times):
        with BareConnection(ports.grpc, timeout=120) as connection:
            try:
                answer = connection.ask(INFER, framed_bytes_request(graph, "in", b"x")[5:])
                said.append(f"{answer.status} in {len(answer.headers.get('grpc-message', ''))} characters")
            except ConnectionEnded:
                said.append("no answer")
    return "status " + ", ".join(said)


def long_texts(ports: Ports) -> str:
    """Raise an exception of 20 MB, five times."""
    return _ask(ports, "long_text", 5)


def long_chains(ports: Ports) -> str:
    """Raise an exception with a thousand causes, five times."""
    return _ask(ports, "long_chain", 5)


def long_outputs(ports: Ports) -> str:
    """Answer with 400 MB, which is more than an answer may have, three times."""
    return _ask(ports, "long_output", 3)
