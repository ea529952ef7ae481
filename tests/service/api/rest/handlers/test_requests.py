"""How requests to handlers end: answers, streams, errors, refusals, and clients that leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.service.api.rest.handlers.servers import ServedHandler, serving_handler
from tests.support.waits import WAIT_SECONDS, until_async

lanes = pytest.mark.parametrize("fast", [True, False], ids=["fast", "application"])

FAILING = """
from ovmstrio.handlers import HTTPError

class Handler:
    def handle_post(self, payload):
        if payload == "status":
            raise HTTPError(418, "short and stout", {"X-Kind": "pot"})
        raise ValueError("a secret")
"""
WAITING = """
import threading

class Handler:
    def __init__(self):
        self.go = threading.Event()
        self.calls = []

    def handle_post(self, payload):
        self.calls.append(payload)
        if payload == "wait":
            self.go.wait(60)
        if payload == "fail":
            raise ValueError
        return payload
"""
STREAMS = """
import threading
from ovmstrio.handlers import Response

class Handler:
    def __init__(self):
        self.closed = threading.Event()
        self.done = threading.Event()

    def handle_get(self, query_params):
        try:
            for number in range(int(query_params["count"])):
                yield f"{number};"
            if "fail" in query_params:
                raise ValueError("in the middle")
        finally:
            self.closed.set()

    def handle_post(self, payload):
        return payload, self.done.set

    def handle_put(self, payload):
        return Response("made", 201, headers={"X-Own": payload, "Content-Length": "3"})
"""
TEXT = {"Content-Type": "text/plain"}


@lanes
@pytest.mark.parametrize("shows_details", [True, False])
async def test_a_failing_handler_tells_its_caller_nothing(tmp_path: Path, fast: bool, shows_details: bool) -> None:
    """Unless the server is told to; the log has it once."""
    async with serving_handler(tmp_path, FAILING, shows_details=shows_details) as served:
        with capture_logs() as logs:
            answer = await served.ask(content=b"x", headers=TEXT, fast=fast)
    assert answer.status_code == 500
    if shows_details:
        assert "ValueError: a secret" in answer.text
    else:
        assert answer.text == "internal server error"
    errors = [each for each in logs if each["log_level"] == "error"]
    assert len(errors) == 1
    assert errors[0]["exc_info"]


@lanes
async def test_a_client_that_wants_json_gets_its_errors_so(tmp_path: Path, fast: bool) -> None:
    """With the same words."""
    headers = TEXT | {"Accept": "application/json"}
    async with serving_handler(tmp_path, FAILING) as served:
        answer = await served.ask(content=b"x", headers=headers, fast=fast)
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")
    assert answer.json() == {"error": "internal server error"}


@lanes
async def test_a_handler_may_end_a_request_with_a_status(tmp_path: Path, fast: bool) -> None:
    """With headers of its own."""
    async with serving_handler(tmp_path, FAILING) as served:
        answer = await served.ask(content=b"status", headers=TEXT, fast=fast)
    assert (answer.status_code, answer.text, answer.headers["x-kind"]) == (418, "short and stout", "pot")


@lanes
async def test_a_handler_may_give_a_whole_response(tmp_path: Path, fast: bool) -> None:
    """Its headers are sent, but not one that lies about the body."""
    async with serving_handler(tmp_path, STREAMS) as served:
        answer = await served.ask("PUT", content=b"mine", headers=TEXT, fast=fast)
    assert (answer.status_code, answer.text, answer.headers["x-own"]) == (201, "made", "mine")


@lanes
@pytest.mark.parametrize("value", ["a\r\nX-Forged: 1", "\u20ac"])
async def test_headers_cannot_be_forged(tmp_path: Path, fast: bool, value: str) -> None:
    """A value with a line break, or one that HTTP does not have, fails the request."""
    async with serving_handler(tmp_path, STREAMS) as served:
        with capture_logs() as logs:
            answer = await served.ask("PUT", content=value.encode(), headers=TEXT, fast=fast)
    assert (answer.status_code, answer.text) == (500, "internal server error")
    assert "x-forged" not in answer.headers
    assert [each["event"] for each in logs if each["log_level"] == "error"] == ["a handler's answer cannot be sent"]


@lanes
async def test_a_generator_is_a_stream(tmp_path: Path, fast: bool) -> None:
    """Whatever it yields is sent as it comes, and the connection serves the next request."""
    async with serving_handler(tmp_path, STREAMS) as served, served.client() as client:
        for count in (3, 0, 500):
            answer = await client.get("/", params={"count": count}, headers={} if fast else {"TE": "trailers"})
            assert answer.text == "".join(f"{number};" for number in range(count))
        assert served.limit.in_flight == 0


@lanes
async def test_a_generator_that_fails_breaks_its_answer_off(tmp_path: Path, fast: bool) -> None:
    """So that the client cannot take a part for the whole."""
    async with serving_handler(tmp_path, STREAMS) as served:
        with pytest.raises(httpx.RemoteProtocolError):
            await served.ask("GET", "/?count=3&fail=1", fast=fast)
        await served.limit.wait(0)


@lanes
async def test_a_client_that_leaves_ends_its_stream(tmp_path: Path, fast: bool) -> None:
    """The generator is closed, and the request is not in flight any more."""
    extra = "" if fast else "TE: trailers\r\n"
    async with serving_handler(tmp_path, STREAMS, max_concurrency=1) as served:
        async with served.connect() as peer:
            await peer.send(f"GET /?count=100000000 HTTP/1.1\r\nHost: h\r\n{extra}\r\n".encode())
            assert await peer.stream.receive_some()
        assert await trio.to_thread.run_sync(served.instance.closed.wait, WAIT_SECONDS)
        await served.limit.wait(0)


@lanes
async def test_callbacks_follow_the_answer(tmp_path: Path, fast: bool) -> None:
    """They run once it has been sent."""
    async with serving_handler(tmp_path, STREAMS) as served:
        answer = await served.ask(json=[1], fast=fast)
        assert answer.json() == [1]
        assert await trio.to_thread.run_sync(served.instance.done.wait, WAIT_SECONDS)


@lanes
async def test_callbacks_wait_for_all_of_the_answer(tmp_path: Path, fast: bool) -> None:
    """While a client still reads it, they do not run; a client that leaves within it does not keep them from it."""
    extra = "" if fast else "TE: trailers\r\n"
    body = b"x" * 20_000_000
    head = f"POST / HTTP/1.1\r\nHost: h\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode()
    async with serving_handler(tmp_path, STREAMS) as served:
        async with served.connect() as peer:
            await peer.send(head + body)
            assert await peer.stream.receive_some(100)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not served.instance.done.is_set()
        assert await trio.to_thread.run_sync(served.instance.done.wait, WAIT_SECONDS)


@lanes
async def test_a_call_that_got_no_thread_is_told_when_to_try_again(tmp_path: Path, fast: bool) -> None:
    """As any that is refused because too much is to do."""
    options: dict[str, Any] = {"threads_per_process": 1, "queue_timeout": 0.01}
    async with serving_handler(tmp_path, WAITING, **options) as served, trio.open_nursery() as nursery:
        nursery.start_soon(_ask, served, b"wait", fast)
        await until_async(lambda: served.instance.calls == ["wait"])
        answer = await served.ask(content=b"second", headers=TEXT, fast=fast)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        served.instance.go.set()


@lanes
async def test_what_is_beyond_the_limit_is_refused_at_once(tmp_path: Path, fast: bool) -> None:
    """With the time to try again; an end of any kind, errors too, makes room."""
    async with serving_handler(tmp_path, WAITING, max_concurrency=2) as served, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(_ask, served, b"wait", fast)
        await served.limit.wait(2)
        answer = await served.ask(content=b"third", headers=TEXT, fast=fast)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["access-control-allow-origin"] == "*"
        assert (await served.ask("GET", "/info", fast=fast)).status_code == 200
        served.instance.go.set()
        await served.limit.wait(0)
        assert (await served.ask(content=b"fail", headers=TEXT, fast=fast)).status_code == 500
        assert served.limit.in_flight == 0
        assert "third" not in served.instance.calls


@lanes
async def test_what_is_beyond_the_limit_is_refused_at_its_head(tmp_path: Path, fast: bool) -> None:
    """Its body has not come yet; a request whose body never comes holds its place no longer than its connection."""
    extra = "" if fast else "TE: trailers\r\n"
    head = f"POST / HTTP/1.1\r\nHost: h\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n{extra}\r\n".encode()
    async with serving_handler(tmp_path, WAITING, max_concurrency=1) as served:
        async with served.connect() as first, served.connect() as second:
            await first.send(head)
            await served.limit.wait(1)
            answer = await second.ask(head)
            text = "1 requests are in flight already, which is max_concurrency; try again later"
            assert (answer.status, answer.body.decode()) == (503, text)
        await served.limit.wait(0)
        assert (await served.ask(content=b"next", headers=TEXT, fast=fast)).text == "next"
        assert served.limit.in_flight == 0


@lanes
async def test_who_leaves_the_queue_is_not_served(tmp_path: Path, fast: bool) -> None:
    """A request whose client has gone before its turn never reaches the handler."""
    async with serving_handler(tmp_path, WAITING) as served, trio.open_nursery() as nursery:
        nursery.start_soon(_ask, served, b"wait", fast)
        await served.limit.wait(1)
        async with trio.open_nursery() as leaving:
            leaving.start_soon(_ask, served, b"gone", fast)
            await served.limit.wait(2)
            leaving.cancel_scope.cancel()
        await served.limit.wait(1)
        served.instance.go.set()
        assert (await served.ask(content=b"last", headers=TEXT, fast=fast)).text == "last"
        assert served.instance.calls == ["wait", "last"]


async def test_a_drain_lets_requests_in_flight_end(tmp_path: Path) -> None:
    """They are answered, and nobody else is served."""
    async with serving_handler(tmp_path, WAITING) as served, trio.open_nursery() as nursery:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await served.ask(content=b"wait", headers=TEXT))

        nursery.start_soon(ask)
        await served.limit.wait(1)
        nursery.start_soon(served.front_end.drain, WAIT_SECONDS)
        await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(httpx.ConnectError):
            await served.ask(content=b"late", headers=TEXT)
        served.instance.go.set()
    assert [answer.text for answer in answers] == ["wait"]


async def _ask(served: ServedHandler, content: bytes, fast: bool) -> None:
    await served.ask(content=content, headers=TEXT, fast=fast)
