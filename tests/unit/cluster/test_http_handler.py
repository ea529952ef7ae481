from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import orjson
import pytest
import trio
import trio.testing

from ovmstrio.cluster.ray.http import ClusterHttpHandler
from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.http.responses import json_response
from ovmstrio.transport.http.router import Router, rule
from tests.support.waits import WAIT_SECONDS

LIMIT = 1024


@pytest.fixture(params=[True, False], ids=["hot", "cold"])
def is_hot(request: pytest.FixtureRequest) -> bool:
    is_hot: bool = request.param
    return is_hot


class _Stream:
    def __init__(self, pieces: int, error: Exception | None = None) -> None:
        self._left = pieces
        self._error = error
        self.closed = trio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._left:
            self._left -= 1
            return b"piece "
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed.set()


class _Slot:
    def __init__(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False


@asynccontextmanager
async def _handler(
    stream: _Stream, *, is_hot: bool = True, status: int = 200, slot: _Slot | None = None
) -> AsyncIterator[ClusterHttpHandler]:
    async def admit(_: str) -> Any:
        return slot

    async def stream_body(_: HttpRequest) -> HttpAnswer:
        return HttpAnswer(status, (), stream)

    async def return_body(_: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (), b"whole")

    def refuse(error: Exception) -> HttpAnswer:
        return json_response({"error": str(error)}, 400)

    rules = [
        rule("/stream_body", "GET", stream_body, is_hot=is_hot, admit=admit, need=Permission.INFER),
        rule("/whole", "GET", return_body, need=Permission.INFER, refuse=refuse),
    ]
    async with trio.open_nursery() as tasks:
        yield ClusterHttpHandler(Router(rules, OvmsRouteErrors(), has_limits=lambda: slot is not None), tasks, LIMIT)
        tasks.cancel_scope.cancel()


def _request(target: str) -> HttpRequest:
    return HttpRequest("GET", "", target=target)


async def _read_all(pieces: Any) -> bytes:
    found = b""
    with suppress(trio.EndOfChannel):
        while True:
            found += await pieces.receive()
    return found


async def test_a_stream_arrives_in_pieces_and_holds_its_slot_until_its_end(is_hot: bool) -> None:
    stream, slot = _Stream(100), _Slot()
    async with _handler(stream, is_hot=is_hot, slot=slot) as handler:
        head = await handler.answer(_request("/stream_body"))
        assert slot.is_held
        assert (head.status, await _read_all(head.pieces)) == (200, b"piece " * 100)
        await stream.closed.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not slot.is_held


async def test_a_status_without_a_body_has_no_pieces() -> None:
    stream = _Stream(3)
    async with _handler(stream, status=204) as handler:
        head = await handler.answer(_request("/stream_body"))
        assert (head.status, await _read_all(head.pieces)) == (204, b"")
        await stream.closed.wait()


@pytest.mark.parametrize("error", [trio.BrokenResourceError("the handler failed"), RuntimeError("unforeseen")])
async def test_a_failed_stream_is_reported_as_broken_and_ends_alone(error: Exception, is_hot: bool) -> None:
    stream = _Stream(2, error)
    async with _handler(stream, is_hot=is_hot) as handler:
        head = await handler.answer(_request("/stream_body"))
        assert head.pieces is not None
        assert [await head.pieces.receive() for _ in range(2)] == [b"piece "] * 2
        with pytest.raises(trio.BrokenResourceError, match="incomplete response"):
            await head.pieces.receive()
        await stream.closed.wait()
        assert (await handler.answer(_request("/whole"))).body == b"whole"


async def test_a_stream_without_a_reader_is_closed(is_hot: bool) -> None:
    stream = _Stream(10_000)
    async with _handler(stream, is_hot=is_hot) as handler:
        head = await handler.answer(_request("/stream_body"))
        assert head.pieces is not None
        del head
        gc.collect()
        with trio.fail_after(WAIT_SECONDS):
            await stream.closed.wait()


async def test_refusals_have_the_format_of_their_path() -> None:
    async with _handler(_Stream(0)) as handler:
        error = NotSupported("not here")
        refused = await handler.refuse(_request("/whole?x=1"), error)
        assert (refused.status, orjson.loads(refused.body)) == (400, {"error": "not here"})
        nowhere = await handler.refuse(_request("/nowhere"), error)
        assert (nowhere.status, orjson.loads(nowhere.body)) == (501, {"error": "not here"})
