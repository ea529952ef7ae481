"""Calls whose errors or answers are very long."""

from __future__ import annotations

from typing import Final

from benchmarks.requests import framed_bytes_request
from tests.attacks.served import Ports
from tests.support.bare_http2 import BareConnection, ConnectionEnded

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"


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
