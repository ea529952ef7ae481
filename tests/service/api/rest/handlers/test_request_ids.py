"""Which request a line of the log is about."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from tests.service.api.rest.handlers.servers import ServedHandler, serving_handler
from tests.support.waits import WAIT_SECONDS

lanes = pytest.mark.parametrize("fast", [True, False], ids=["fast", "application"])

CODE = """
import threading
import structlog
from ovmstrio.handlers import Response

log = structlog.get_logger("handler")

class Handler:
    def __init__(self):
        self.done = threading.Event()

    def handle_post(self, payload):
        log.info("working")
        if payload == "fail":
            raise ValueError
        return payload

    def handle_get(self):
        def after():
            self.done.set()
            raise ValueError
        return "first", after

    def handle_put(self):
        yield "first"
        raise ValueError("in the middle")

    def handle_delete(self):
        return Response("mine", headers={"X-Request-Id": "of-the-handler"})
"""
KEY = "x-request-id"


async def _ask(served: ServedHandler, verb: str, *, fast: bool, **options: Any) -> tuple[httpx.Response, set[str]]:
    """Ask once; give the answer, and the requests that the log tells of."""
    with capture_logs([merge_contextvars]) as logs:
        answer = await served.ask(verb, fast=fast, **options)
    return answer, _ids(logs)


def _ids(logs: list[MutableMapping[str, Any]]) -> set[str]:
    return {line.get("request_id", "") for line in logs if line["log_level"] in {"info", "error"}}


@lanes
async def test_a_failure_has_an_id_in_the_log_and_in_the_answer(tmp_path: Path, fast: bool) -> None:
    """Of the server's making, another one for each request; what succeeds has none in its answer."""
    async with serving_handler(tmp_path, CODE) as served:
        seen = [await _ask(served, "POST", fast=fast, content="fail", headers=_text()) for _ in range(2)]
        answer, ids = await _ask(served, "POST", fast=fast, content="x", headers=_text())
    assert KEY not in answer.headers
    assert len(ids) == 1
    assert "" not in ids
    for failed, found in seen:
        assert failed.status_code == 500
        assert found == {failed.headers[KEY]}
    assert seen[0][1] != seen[1][1]


@lanes
@pytest.mark.parametrize("payload", ["fail", "x"])
async def test_the_id_of_the_client_is_kept(tmp_path: Path, fast: bool, payload: str) -> None:
    """So that it finds its request again in the log."""
    async with serving_handler(tmp_path, CODE) as served:
        answer, ids = await _ask(served, "POST", fast=fast, content=payload, headers=_text({"X-Request-Id": "a-1"}))
    assert answer.headers[KEY] == "a-1"
    assert ids == {"a-1"}


@lanes
@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "\u00e9"])
async def test_an_id_that_is_none_is_replaced(tmp_path: Path, fast: bool, sent: str) -> None:
    """Whatever a client sends, a line of the log stays readable."""
    headers = _text({"X-Request-Id": sent.encode("latin-1")})
    async with serving_handler(tmp_path, CODE) as served:
        answer, ids = await _ask(served, "POST", fast=fast, content="fail", headers=headers)
    assert ids == {answer.headers[KEY]}
    assert answer.headers[KEY] != sent


@lanes
async def test_what_comes_after_the_answer_is_of_its_request(tmp_path: Path, fast: bool) -> None:
    """A callback, and the rest of a stream."""
    headers = {"X-Request-Id": "a-1"}
    with capture_logs([merge_contextvars]) as logs:
        async with serving_handler(tmp_path, CODE) as served:
            assert (await served.ask("GET", fast=fast, headers=headers)).text == "first"
            assert await trio.to_thread.run_sync(served.instance.done.wait, WAIT_SECONDS)
            with pytest.raises(httpx.RemoteProtocolError):
                await served.ask("PUT", fast=fast, headers=headers)
            await served.limit.wait(0)
            served.handler.run_after([_nothing])
    errors = [line for line in logs if line["log_level"] == "error"]
    assert [line["method"] for line in errors] == ["callback", "handle_put"]
    assert _ids(errors) == {"a-1"}


async def _nothing() -> None:
    """End at once."""


async def test_a_handler_may_give_an_id_of_its_own(tmp_path: Path) -> None:
    """There is one header then."""
    async with serving_handler(tmp_path, CODE) as served:
        answer = await served.ask("DELETE", headers={"X-Request-Id": "a-1"})
    assert answer.headers.get_list(KEY) == ["of-the-handler"]


def _text(more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"Content-Type": "text/plain"} | (more or {})
