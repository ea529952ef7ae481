"""Deadlines, retries and cancellation of AsyncClient, against a scripted server on memory streams and a mock clock."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.client import AsyncClient, Unreachable
from ovmstrio.core import errors

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
GONE = b""


def refusal(status: int, seconds: int | None = None) -> bytes:
    wait = "" if seconds is None else f"Retry-After: {seconds}\r\n"
    return f'HTTP/1.1 {status} No\r\n{wait}Content-Length: 16\r\n\r\n{{"error":"full"}}'.encode()


class Stream(anyio.abc.ByteStream):
    """One side of a memory connection as a stream of anyio."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        data = bytes(await self._stream.receive_some(max_bytes))
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        await self._stream.send_all(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Server:
    """Answers each request with the next of ``answers``: bytes, seconds to wait for ever, or an error to connect."""

    def __init__(self, *answers: bytes | OSError | None) -> None:
        self._answers = list(answers)
        self._tasks: trio.Nursery | None = None
        self.requests = 0
        self.connections = 0
        self.times: list[float] = []
        self.lost = trio.Event()

    def client(self, tasks: trio.Nursery, **options: Any) -> AsyncClient:
        self._tasks = tasks
        return AsyncClient("http://memory", connect=self._connect, **options)

    async def _connect(self) -> Stream:
        self.connections += 1
        self.times.append(trio.current_time())
        if self._answers and isinstance(self._answers[0], OSError):
            raise self._answers.pop(0)  # type: ignore[misc]  # checked above
        ours, theirs = trio.testing.memory_stream_pair()
        assert self._tasks is not None
        self._tasks.start_soon(self._serve, theirs)
        return Stream(ours)

    async def _serve(self, stream: Any) -> None:
        while await stream.receive_some():
            self.requests += 1
            answer = self._answers.pop(0)
            if answer is None:
                with suppress(trio.BrokenResourceError):
                    await stream.receive_some()
                self.lost.set()
                return
            assert isinstance(answer, bytes)
            if not answer:
                break
            await stream.send_all(answer)
        await stream.aclose()


async def outcome(server: Server, call: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    """Return the result of a call, or its error, and the seconds that it took."""
    async with trio.open_nursery() as tasks:
        began = trio.current_time()
        try:
            async with server.client(tasks, **options) as client:
                return await call(client), trio.current_time() - began
        except errors.ServerError as error:
            return error, trio.current_time() - began
        finally:
            tasks.cancel_scope.cancel()


def models(client: AsyncClient) -> Awaitable[Any]:
    return client.models()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_with_a_time_to_wait_is_repeated_after_that_time(
    autojump_clock: trio.testing.MockClock, status: int
) -> None:
    server = Server(refusal(status, 3), refusal(status, 5), OK)
    assert await outcome(server, models) == ([], 8.0)
    assert (server.requests, server.connections) == (3, 1)


@pytest.mark.parametrize(
    ("answers", "options", "requests", "cls"),
    [
        pytest.param([refusal(429, 1)] * 3, {}, 3, errors.Overloaded, id="more refusals than retries"),
        pytest.param([refusal(429, 1)], {"retries": 0}, 1, errors.Overloaded, id="no retries"),
        pytest.param([refusal(503, 60)], {"timeout": 30}, 1, errors.NotReady, id="a wait beyond the deadline"),
        pytest.param([refusal(503)], {}, 1, errors.NotReady, id="no time to wait"),
        pytest.param([refusal(500, 1)], {}, 1, errors.ModelFailure, id="another status"),
        pytest.param([GONE], {}, 1, Unreachable, id="a connection lost after the request"),
    ],
)
async def test_other_failures_are_not_repeated(
    autojump_clock: trio.testing.MockClock,
    answers: Sequence[bytes],
    options: dict[str, Any],
    requests: int,
    cls: type[Exception],
) -> None:
    server = Server(*answers)
    error, _ = await outcome(server, models, **options)
    assert type(error) is cls or (cls is Unreachable and isinstance(error, Unreachable))
    assert server.requests == requests


async def test_a_refused_connection_is_opened_again_after_a_pause(autojump_clock: trio.testing.MockClock) -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    server = Server(refused, refused, OK)
    result, seconds = await outcome(server, models)
    assert (result, server.connections, seconds) == ([], 3, pytest.approx(0.3))
    error, _ = await outcome(Server(*[refused] * 3), models)
    assert isinstance(error, Unreachable)
    assert "no server answers REST at http://memory: Connection refused" in str(error)


async def test_a_deadline_is_one_for_all_tries(autojump_clock: trio.testing.MockClock) -> None:
    server = Server(refusal(429, 4), None)
    error, seconds = await outcome(server, models, timeout=10)
    assert (type(error), seconds) == (errors.DeadlineExceeded, 10)
    assert "http://memory did not answer in time" in str(error)


async def test_a_call_has_its_own_deadline(autojump_clock: trio.testing.MockClock) -> None:
    def infer(client: AsyncClient) -> Awaitable[Any]:
        return client.infer("m", {"x": np.zeros(1, np.float32)}, timeout=2)

    error, seconds = await outcome(Server(None), infer, timeout=None)
    assert (type(error), seconds) == (errors.DeadlineExceeded, 2)


async def test_a_cancelled_call_closes_its_connection_at_once(autojump_clock: trio.testing.MockClock) -> None:
    server = Server(None)
    async with trio.open_nursery() as tasks:
        client = server.client(tasks)
        with trio.move_on_after(1) as scope:
            await client.models()
        assert scope.cancelled_caught
        began = trio.current_time()
        await server.lost.wait()
        assert trio.current_time() == began


async def test_calls_beyond_the_connections_wait_within_their_deadline(autojump_clock: trio.testing.MockClock) -> None:
    server = Server(None, OK)
    async with trio.open_nursery() as tasks:
        client = server.client(tasks, max_connections=1)
        found: list[Any] = []

        async def call(timeout: float) -> None:  # noqa: ASYNC109 - of the client
            try:
                await client.load("m", timeout=timeout)
            except errors.DeadlineExceeded:
                found.append(trio.current_time())

        began = trio.current_time()
        tasks.start_soon(call, 5)
        await trio.testing.wait_all_tasks_blocked()
        tasks.start_soon(call, 3)
        await trio.sleep(20)
        assert found == [began + 3, began + 5]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("size", [1, 3, math.inf])
@pytest.mark.parametrize(
    "answer",
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'3\r\n[{"\r\n9;x=y\r\nname":"m"\r\n2\r\n}]\r\n0\r\nA: b\r\n\r\n'
        ),
        b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length:  14 \r\n\r\n[{"name":"m"}]',
        b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 14\r\n\r\n[{"name":"m"}]',
    ],
    ids=["chunks", "a length after 100 Continue", "the last of its connection"],
)
async def test_bodies_are_read_in_any_pieces(answer: bytes, size: float) -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def connect() -> Stream:
        return Stream(ours)

    async with trio.open_nursery() as tasks:

        async def serve() -> None:
            await theirs.receive_some()
            step = len(answer) if size == math.inf else int(size)
            for start in range(0, len(answer), step):
                await theirs.send_all(answer[start : start + step])
                await trio.testing.wait_all_tasks_blocked()

        tasks.start_soon(serve)
        client = AsyncClient("http://memory", connect=connect)
        assert [each.name for each in await client.models()] == ["m"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 70_000,
    ],
)
async def test_a_malformed_answer_is_an_error_of_the_server(answer: bytes) -> None:
    error, _ = await outcome(Server(answer), models)
    assert isinstance(error, Unreachable)
    assert "violates HTTP/1.1" in str(error)
