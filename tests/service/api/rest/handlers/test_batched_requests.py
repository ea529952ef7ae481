"""Requests that share a call, as their clients see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import httpx
import trio

from tests.service.api.rest.handlers.servers import serving_handler
from tests.support.waits import WAIT_SECONDS

CODE: Final = """
import threading
from ovmstrio.handlers import Response

class Handler:
    def __init__(self):
        self.done = threading.Event()
        self.sizes = []

    def handle_post(self, payload, headers, query_params):
        self.sizes.append(len(payload))
        who = [f"{each['x-who']} {query['n']} {given}" for each, query, given in zip(headers, query_params, payload)]
        made = {
            "text": lambda text: text,
            "bytes": str.encode,
            "json": lambda text: {"who": text},
            "response": lambda text: Response(text, 201, headers={"X-Own": "1"}),
            "callback": lambda text: (text, self.done.set),
            "error": ValueError,
        }
        return [made[kind](text) for kind, text in zip(payload, who)]

    def handle_put(self, payload):
        return payload
"""
EXPECTED: Final = {
    "text": (200, "text/plain; charset=utf-8", "text 0 text"),
    "bytes": (200, "application/octet-stream", "bytes 1 bytes"),
    "json": (200, "application/json", '{"who": "json 2 json"}'),
    "response": (201, None, "response 3 response"),
    "callback": (200, "text/plain; charset=utf-8", "callback 4 callback"),
    "error": (500, "text/plain; charset=utf-8", "error 5 error"),
}


async def test_each_result_of_a_batch_is_an_answer_of_its_kind(tmp_path: Path) -> None:
    """Its arguments were its own; a malformed request and other verbs have no part in it."""
    batching: dict[str, Any] = {"max_batch_size": len(EXPECTED), "batch_interval_seconds": 3600}
    answers: dict[str, httpx.Response] = {}
    async with serving_handler(tmp_path, CODE, server_side_batching=batching) as served:

        async def post(number: int, kind: str) -> None:
            headers = {"X-Who": kind}
            answers[kind] = await served.ask("POST", f"/?n={number}", json=kind, headers=headers, fast=number % 2 == 0)

        async with trio.open_nursery() as nursery:
            for number, kind in enumerate(EXPECTED):
                if number == len(EXPECTED) - 1:
                    await served.limit.wait(number)
                    bad = await served.ask(content=b"{", headers={"Content-Type": "application/json"})
                    assert (bad.status_code, list(bad.json())) == (400, ["error"])
                    assert (await served.ask("PUT", json=[1])).json() == [1]
                nursery.start_soon(post, number, kind)
        assert await trio.to_thread.run_sync(served.instance.done.wait, WAIT_SECONDS)
        assert served.instance.sizes == [len(EXPECTED)]
    for kind, (status, content_type, text) in EXPECTED.items():
        answer = answers[kind]
        assert (answer.status_code, answer.headers.get("content-type"), answer.text) == (status, content_type, text)
    assert answers["response"].headers["x-own"] == "1"


async def test_a_client_that_leaves_takes_its_part_out_of_the_batch(tmp_path: Path) -> None:
    """The others' batch is made without it."""
    batching: dict[str, Any] = {"max_batch_size": 2, "batch_interval_seconds": 3600}
    answers: list[str] = []
    async with serving_handler(tmp_path, CODE, server_side_batching=batching) as served:

        async def post(kind: str) -> None:
            answers.append((await served.ask("POST", "/?n=0", json=kind, headers={"X-Who": kind})).text)

        async with trio.open_nursery() as leaving:
            leaving.start_soon(post, "bytes")
            await served.limit.wait(1)
            leaving.cancel_scope.cancel()
        await served.limit.wait(0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, "text")
            nursery.start_soon(post, "callback")
        assert sorted(answers) == ["callback 0 callback", "text 0 text"]
        assert served.instance.sizes == [2]
