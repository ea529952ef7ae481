"""What a plain request costs the server's thread, in calls of Python functions."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import trio

from tests.api.rest.handlers.servers import serving_handler
from tests.api.rest.servers import infer_post, serving_rest

HANDLER = "class Handler:\n    def handle_post(self, payload):\n        return payload\n"
MOST_OF_A_HANDLER = 335 * 1.1
MOST_OF_AN_INFERENCE = 248 * 1.1
"""With room for a busy machine, on which the event loop takes more turns for the same requests."""


def _drive(address: str, request: bytes, count: int) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        for _ in range(count):
            client.sendall(request)
            come = client.recv(65536)
            head, _, body = come.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += client.recv(65536)


async def _calls_of_one(address: str, request: bytes) -> float:
    """Count what 40 more requests on a connection cost, at best of a few times; other threads are not counted."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    async def calls_of(requests: int) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            await trio.to_thread.run_sync(_drive, address, request, requests)
        finally:
            sys.setprofile(None)
        return calls

    await trio.to_thread.run_sync(_drive, address, request, 20)
    rounds = [(await calls_of(10), await calls_of(50)) for _ in range(5)]
    return min((many - few) / 40 for few, many in rounds)


async def test_a_post_to_a_handler(tmp_path: Path) -> None:
    """Its method runs in a thread, whose calls are not the server's."""
    body = b'{"a":1}'
    head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving_handler(tmp_path, HANDLER) as served:
        assert await _calls_of_one(served.address, head + body) <= MOST_OF_A_HANDLER


async def test_an_inference(tmp_path: Path) -> None:
    """Of a servable that does nothing."""
    async with serving_rest(tmp_path) as serving:
        assert await _calls_of_one(serving.address, infer_post()) <= MOST_OF_AN_INFERENCE
