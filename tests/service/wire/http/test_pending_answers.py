from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
import trio.testing

from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.core.pending_answers import PendingAnswers, PendingShare, current_share
from ovmstrio.wire.http.http_server import HttpFrontEnd
from ovmstrio.wire.http.router import Refusals, Router, rule
from tests.support.waits import WAIT_SECONDS, until_async

SIZE = 30_000_000
LANES = {"fast": b"", "application": b"TE: trailers\r\n"}


class _Refusals(Refusals):
    def no_path(self, method: str, path: str) -> HttpAnswer:
        return HttpAnswer(404)

    def no_method(self, method: str, path: str) -> HttpAnswer:
        return HttpAnswer(405)


Serve = Callable[[PendingAnswers], Awaitable[str]]


@pytest.fixture
async def serve(nursery: trio.Nursery) -> AsyncIterator[Serve]:
    """Yield a function that serves a large answer and returns the address."""

    async def view(_request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (), bytes(SIZE))

    async def start(pending: PendingAnswers) -> str:
        router = Router([rule("/large", "GET", view, is_hot=True)], _Refusals())
        front_end = HttpFrontEnd(["127.0.0.1:0"], router, pending=pending)
        addresses: list[str] = await nursery.start(front_end.serve)
        return addresses[0]

    yield start
    nursery.cancel_scope.cancel()


async def _ask(address: str, lane: bytes) -> trio.SocketStream:
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    await stream.send_all(b"GET /large HTTP/1.1\r\nHost: h\r\n" + lane + b"\r\n")
    return stream


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
async def test_bytes_of_an_answer_count_until_the_client_reads_or_leaves(serve: Serve, lane: bytes) -> None:
    pending = PendingAnswers()
    address = await serve(pending)
    async with await _ask(address, lane) as stream:
        await until_async(lambda: pending.budget.held >= SIZE)
        taken = 0
        with trio.fail_after(WAIT_SECONDS):
            while taken < SIZE:
                taken += len(await stream.receive_some(1_000_000))
        await until_async(lambda: pending.budget.held == 0)
        await stream.send_all(b"GET /large HTTP/1.1\r\nHost: h\r\n" + lane + b"\r\n")
        await until_async(lambda: pending.budget.held >= SIZE)
    await until_async(lambda: pending.budget.held == 0)


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
async def test_clients_that_read_nothing_are_cut_off_after_the_stall_limit(serve: Serve, lane: bytes) -> None:
    pending = PendingAnswers(stalled_seconds=0.3)
    address = await serve(pending)
    async with await _ask(address, lane):
        await until_async(lambda: pending.budget.held >= SIZE)
        await until_async(lambda: pending.budget.held == 0)


async def test_requests_of_a_connection_have_the_same_share(nursery: trio.Nursery) -> None:
    seen: list[PendingShare | None] = []

    async def view(_request: HttpRequest) -> HttpAnswer:
        seen.append(current_share.get())
        return HttpAnswer(200, (), b"")

    front_end = HttpFrontEnd(["127.0.0.1:0"], Router([rule("/large", "GET", view, is_hot=True)], _Refusals()))
    (address,) = await nursery.start(front_end.serve)
    async with await _ask(address, b"") as one, await _ask(address, LANES["application"]):
        await one.send_all(b"GET /large HTTP/1.1\r\nHost: h\r\nTE: trailers\r\n\r\n")
        await until_async(lambda: len(seen) == 3)
    assert None not in seen
    assert sorted(map(seen.count, set(seen))) == [1, 2]
    nursery.cancel_scope.cancel()
