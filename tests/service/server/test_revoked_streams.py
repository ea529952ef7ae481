"""Streams of callers that are not known any more: they end at every door when the file of keys is read again."""

from __future__ import annotations

import json
import queue
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import trio

from ovmstrio.access.key_file import write_key_file
from tests.service.server.test_traces import serving
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.callers import bearer, entry_of
from tests.support.graphs import LOOPBACK, graph_text, python_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.served_in_thread import ServedPlan

PATIENCE: Final = 60
LAST_CHUNK: Final = b"0\r\n\r\n"
ENDLESS_NODE: Final = """
import time
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        while True:
            yield [Tensor("out", b"tick")]
            time.sleep(0.02)
"""
ENDLESS_HANDLER: Final = """
import time

class Handler:
    def handle_post(self, payload):
        def ticks():
            while True:
                yield b"tick"
                time.sleep(0.02)
        return ticks()
"""
CHAT: Final = {"model": "graph", "stream": True, "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def _keyed(tmp_path: Path, *callers: str) -> AsyncIterator[tuple[ServedPlan, Callable[..., None]]]:
    """Serve streams that do not end to callers of these names; gives what leaves only some of them."""
    keys = tmp_path / "keys.json"

    def know(*names: str, scope: str = "infer:*") -> None:
        write_key_file(keys, [entry_of(name, scope) for name in names])

    config = write_all_kinds(tmp_path, node=ENDLESS_NODE, handler=ENDLESS_HANDLER)
    text = graph_text(python_node("node.py", ["IN:in"], ["OUT:out"], more=LOOPBACK))
    (tmp_path / "graph" / "graph.pbtxt").write_text(text)
    know(*callers)
    with trio.fail_after(2 * PATIENCE):
        async with serving(config, keys_file=keys, file_system_poll_wait_seconds=0.2) as server:
            yield server, know


@asynccontextmanager
async def _streaming(server: ServedPlan, caller: str, path: str, body: Any) -> AsyncIterator[trio.SocketStream]:
    """Ask for a stream over REST, and give the connection once it has begun."""
    host, _, port = server.rest[0].rpartition(":")
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {caller}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream(host, int(port)) as connection:
        await connection.send_all(head.encode() + content)
        come = await _read(connection, b"tick")
        assert come.startswith(b"HTTP/1.1 200"), come
        yield connection


async def _read(connection: trio.SocketStream, text: bytes) -> bytes:
    """Read until a text has come, or the other end has closed."""
    come = b""
    while text not in come:
        piece = await connection.receive_some()
        if not piece:
            break
        come += piece
    return come


@pytest.mark.parametrize(
    ("path", "body"), [("/v2/models/graph/generate_stream", {"in": "x"}), ("/v3/chat/completions", CHAT)]
)
async def test_events_of_a_caller_that_is_gone_end_with_one_that_says_so(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """Those of another caller go on."""
    async with (
        _keyed(tmp_path, "shop", "stays") as (server, know),
        _streaming(server, "shop", path, body) as gone,
        _streaming(server, "stays", path, body) as kept,
    ):
        know("stays")
        assert (await _read(gone, LAST_CHUNK)).rpartition(b"data: ")[2].count(b"the key is not known") == 1
        await kept.receive_some()
        assert b"tick" in await _read(kept, b"tick")


async def test_a_handlers_answer_breaks_off(tmp_path: Path) -> None:
    """It has no place for an error, and must not be taken for whole."""
    async with _keyed(tmp_path, "shop") as (server, know), _streaming(server, "shop", "/handler", [1]) as answer:
        know()
        rest = await _read(answer, LAST_CHUNK)
    assert not rest.endswith(LAST_CHUNK)


def _stream_over_grpc(address: str, name: str, forget: Callable[[], None]) -> str:
    """Stream to a graph or a model, and give what ended it."""
    triton = triton_module("grpc")
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    given = triton.InferInput("b", [1, 10], "FP32")
    given.set_data_from_numpy(np.ones((1, 10), np.float32))
    if name == "graph":
        given = triton.InferInput("in", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"x"], np.object_))
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), headers=bearer("shop"))
        client.async_stream_infer(name, [given])
        assert answers.get(timeout=PATIENCE)[1] is None
        forget()
        error = None
        while error is None:
            error = answers.get(timeout=PATIENCE)[1]
        client.stop_stream(cancel_requests=True)
    return str(error)


@pytest.mark.parametrize("name", ["graph", "model"])
async def test_a_stream_over_grpc_ends_as_unauthenticated(tmp_path: Path, name: str) -> None:
    """One of replies that never stop, and one that waits for its client to say more."""
    async with _keyed(tmp_path, "shop") as (server, know):
        error = await trio.to_thread.run_sync(_stream_over_grpc, server.grpc[0], name, know)
    assert "UNAUTHENTICATED" in error
    assert "the key is not known" in error


async def test_a_stream_ends_as_denied_where_its_caller_may_do_less(tmp_path: Path) -> None:
    """Whoever may do more is not disturbed."""
    async with _keyed(tmp_path, "shop") as (server, know):
        forget = partial(know, "shop", scope="infer:other")
        error = await trio.to_thread.run_sync(_stream_over_grpc, server.grpc[0], "graph", forget)
    assert "PERMISSION_DENIED" in error
    assert json.dumps("shop").strip('"') in error
