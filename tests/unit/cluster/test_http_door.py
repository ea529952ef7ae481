"""The door for HTTP where another server has the wire: streams that fail, readers that are gone, and refusals."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import orjson
import pytest
import trio
import trio.testing

from ovmstrio.api.refusals import OvmsRefusals
from ovmstrio.cluster.ray.http_door import HttpDoor
from ovmstrio.core.callers import Need
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import Router, rule
from tests.support.waits import WAIT_SECONDS

LIMIT = 1024


class _Stream:
    """Gives pieces, and then an error or its end."""

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


class _Place:
    """A place among those that a service has."""

    def __init__(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False


@asynccontextmanager
async def _door(
    stream: _Stream, *, is_hot: bool = True, status: int = 200, place: _Place | None = None
) -> AsyncIterator[HttpDoor]:
    async def admit(_: str) -> Any:
        return place

    async def pour(_: HttpRequest) -> HttpAnswer:
        return HttpAnswer(status, (), stream)

    async def tell(_: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (), b"whole")

    def refuse(error: Exception) -> HttpAnswer:
        return json_answer({"said": str(error)}, 400)

    rules = [
        rule("/pour", "GET", pour, is_hot=is_hot, admit=admit, need=Need.INFER),
        rule("/whole", "GET", tell, need=Need.INFER, refuse=refuse),
    ]
    async with trio.open_nursery() as tasks:
        yield HttpDoor(Router(rules, OvmsRefusals(), has_limits=lambda: place is not None), tasks, LIMIT)
        tasks.cancel_scope.cancel()


def _get(target: str) -> HttpRequest:
    return HttpRequest("GET", "", target=target)


async def _all(pieces: Any) -> bytes:
    found = b""
    while True:
        try:
            found += await pieces.receive()
        except trio.EndOfChannel:
            return found


@pytest.mark.parametrize("is_hot", [True, False])
async def test_a_stream_comes_in_pieces(*, is_hot: bool) -> None:
    """However many there are."""
    stream = _Stream(100)
    async with _door(stream, is_hot=is_hot) as door:
        head = await door.answer(_get("/pour"))
        assert (head.status, await _all(head.pieces)) == (200, b"piece " * 100)
        await stream.closed.wait()


@pytest.mark.parametrize("is_hot", [True, False])
@pytest.mark.parametrize("error", [trio.BrokenResourceError("the handler failed"), RuntimeError("unforeseen")])
async def test_a_stream_that_fails_is_not_taken_for_whole_and_ends_nothing_else(
    error: Exception, *, is_hot: bool
) -> None:
    """Its status has been sent: all that can be said is that this is not all."""
    stream = _Stream(2, error)
    async with _door(stream, is_hot=is_hot) as door:
        head = await door.answer(_get("/pour"))
        assert head.pieces is not None
        assert [await head.pieces.receive() for _ in range(2)] == [b"piece "] * 2
        with pytest.raises(trio.BrokenResourceError, match="the answer broke off"):
            await head.pieces.receive()
        await stream.closed.wait()
        assert (await door.answer(_get("/whole"))).body == b"whole"


@pytest.mark.parametrize("is_hot", [True, False])
async def test_a_stream_whose_reader_is_gone_is_closed(*, is_hot: bool) -> None:
    """Nobody has to say so: a client that leaves between two threads takes the answer with it."""
    stream = _Stream(10_000)
    async with _door(stream, is_hot=is_hot) as door:
        head = await door.answer(_get("/pour"))
        assert head.pieces is not None
        del head
        gc.collect()
        with trio.fail_after(WAIT_SECONDS):
            await stream.closed.wait()


@pytest.mark.parametrize("is_hot", [True, False])
async def test_a_place_is_held_until_the_stream_has_ended(*, is_hot: bool) -> None:
    """Or more than may would be answered at once."""
    stream, place = _Stream(100), _Place()
    async with _door(stream, is_hot=is_hot, place=place) as door:
        head = await door.answer(_get("/pour"))
        assert place.is_held
        await _all(head.pieces)
        await trio.testing.wait_all_tasks_blocked()
        assert not place.is_held


async def test_an_answer_of_a_status_without_a_body_has_no_pieces() -> None:
    """Whatever the service gives."""
    stream = _Stream(3)
    async with _door(stream, status=204) as door:
        head = await door.answer(_get("/pour"))
        assert (head.status, await _all(head.pieces)) == (204, b"")
        await stream.closed.wait()


async def test_what_is_refused_before_is_told_in_the_form_of_the_path() -> None:
    """As what is refused by the path itself."""
    async with _door(_Stream(0)) as door:
        error = NotSupported("not here")
        told = await door.refuse(_get("/whole?x=1"), error)
        assert (told.status, orjson.loads(told.body)) == (400, {"said": "not here"})
        nowhere = await door.refuse(_get("/nowhere"), error)
        assert (nowhere.status, orjson.loads(nowhere.body)) == (501, {"error": "not here"})
