from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trio
import trio.testing
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from tests.service.handlers.servers import ServedHandler, serving_handler
from tests.support.waits import WAIT_SECONDS, until_async

Serve = Callable[..., AbstractAsyncContextManager[ServedHandler]]
JSON, TEXT = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}


@pytest.fixture(params=[True, False], ids=["fast", "application"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    return partial(serving_handler, tmp_path, is_fast=request.param)


# Paths, verbs and arguments

ECHO: Final = """
class Handler:
    def handle_post(self, payload, headers, query_params):
        return {"payload": payload, "header": headers.get("X-Who"), "query": dict(query_params)}

    def handle_get(self, query_params):
        return query_params.get("a", "nothing")

    def handle_delete(self):
        return None
"""


async def test_body_headers_and_query_reach_the_handler(serve: Serve) -> None:
    async with serve(ECHO) as served:
        answer = await served.ask("POST", "/?a=1&a=2&b=x%20y", json={"x": [1.5]}, headers={"x-who": "me"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == {"payload": {"x": [1.5]}, "header": "me", "query": {"a": "2", "b": "x y"}}
        answer = await served.ask("GET", "/?a=text")
        assert (answer.text, answer.headers["content-type"]) == ("text", "text/plain; charset=utf-8")
        # A malformed body is not parsed for a method without a payload argument.
        answer = await served.ask("DELETE", content=b"{", headers=JSON)
        assert (answer.status_code, answer.content) == (200, b"null")


async def test_each_verb_calls_its_method_with_the_arguments_it_declares(serve: Serve) -> None:
    declared = {
        "post": "payload, query_params, headers",
        "get": "headers, extra=5",
        "put": "query_params, payload",
        "patch": "*, headers, payload",
        "delete": "query_params",
    }
    lines = ["class Handler:"]
    for verb, names in declared.items():
        lines += [f"    def handle_{verb}(self, {names}):", f"        return '{verb}', sorted(locals())"]
    async with serve("\n".join(lines)) as served:
        for verb, names in declared.items():
            answer = await served.ask(verb.upper())
            expected = sorted(["self", *(name.partition("=")[0] for name in names.split(", ") if name != "*")])
            assert answer.json() == [verb, expected]


async def test_files_and_fields_of_a_form_reach_the_handler(serve: Serve) -> None:
    code = """
class Handler:
    def handle_post(self, payload):
        file = payload["file"]
        return [file.filename, file.content_type, file.file.read().decode(), payload.getlist("tag")]
"""
    async with serve(code) as served:
        answer = await served.ask(files={"file": ("a.txt", b"hello", "text/plain")}, data={"tag": ["x", "y"]})
    assert answer.json() == ["a.txt", "text/plain", "hello", ["x", "y"]]


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (b"{", "application/json", '{"error":'),
        (b"", "application/json", '{"error":'),
        (b'"\xff"', "application/json", '{"error":'),
        (b"\xff", "text/plain", "the text is not in utf-8"),
        (b"a", "text/plain; charset=klingon", "klingon"),
        (b"a", "multipart/form-data", "boundary"),
    ],
)
async def test_a_malformed_body_is_the_error_of_the_client(serve: Serve, content: bytes, kind: str, text: str) -> None:
    async with serve(ECHO) as served:
        answer = await served.ask(content=content, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert text in answer.text
    assert kind != "application/json" or list(answer.json()) == ["error"]
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


async def test_a_preflight_does_not_reach_the_handler(serve: Serve) -> None:
    async with serve(ECHO) as served:
        answer = await served.ask("OPTIONS")
    assert (answer.status_code, answer.content) == (204, b"")
    expected = {
        "access-control-allow-methods": "POST, GET, PUT, PATCH, DELETE, OPTIONS",
        "access-control-allow-headers": "*",
        "access-control-max-age": "1728000",
        "content-type": "text/plain; charset=utf-8",
    }
    assert {name: answer.headers[name] for name in expected} == expected


@pytest.mark.parametrize("verb", ["PUT", "PATCH", "HEAD", "TRACE"])
async def test_a_verb_without_a_method_is_refused_with_the_allowed_ones(serve: Serve, verb: str) -> None:
    async with serve(ECHO) as served:
        answer = await served.ask(verb)
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, OPTIONS, POST")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "content-type" not in answer.headers
    assert verb == "HEAD" or answer.text == "Method Not Allowed"


@pytest.mark.parametrize("path", ["/other", "/info//", "/info/more", "//", "/v3/models/a", "/models/a", "/..", "/%2f"])
async def test_unknown_paths_are_not_found(serve: Serve, path: str) -> None:
    async with serve(ECHO) as served, served.connect() as peer:
        answer = await peer.ask(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    assert (answer.status, answer.body) == (404, b"Not Found")


async def test_a_handler_is_served_at_the_root_and_below_its_name(serve: Serve) -> None:
    async with serve(ECHO) as served:
        name = served.handler_name
        for path in ("/", f"/{name}", f"/{name}/"):
            assert (await served.ask("POST", path, json=[1])).json()["payload"] == [1]
        for path in ("/info", f"/{name}/info"):
            answer = await served.ask("GET", path)
            assert (answer.status_code, answer.json(), answer.headers["content-type"]) == (200, {}, "application/json")
            answer = await served.ask("GET", f"{path}/")
            assert (answer.status_code, answer.headers["location"]) == (307, path)
        assert (await served.ask("POST", "/info")).status_code == 405
        assert (await served.ask("GET", f"/{name}/other")).text == "Not Found"
        assert (await served.ask("GET", f"/v2/models/{name}")).json()["platform"] == "handler"
        answer = await served.ask("GET", "/v2/models/nothing")
        assert (answer.status_code, list(answer.json())) == (404, ["error"])
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert (await served.ask("GET", path)).status_code == 200


async def test_a_body_above_the_limit_is_refused_in_the_form_of_its_path(serve: Serve) -> None:
    async with serve(ECHO, max_body_bytes=1000) as served:
        answer = await served.ask(content=b"1" * 2000)
        assert (answer.status_code, answer.headers["content-type"]) == (413, "text/plain; charset=utf-8")
        assert "--max-message-size" in answer.text
        assert answer.headers["access-control-allow-origin"] == "*"
        answer = await served.ask("POST", "/v2/models/x/infer", content=b"1" * 2000)
        assert (answer.status_code, list(answer.json())) == (413, ["error"])


# Answers and errors

ANSWERS: Final = """
import threading
from ovmstrio.ext.handlers import HTTPError, Response

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

    def handle_patch(self, payload):
        if payload == "status":
            raise HTTPError(418, "short and stout", {"X-Own": "pot"})
        raise ValueError("a secret")
"""


@pytest.mark.parametrize(
    ("verb", "content", "status", "text"),
    [("PUT", "mine", 201, "made"), ("PATCH", "status", 418, "short and stout")],
    ids=["response", "error"],
)
async def test_a_handler_sets_status_and_headers(serve: Serve, verb: str, content: str, status: int, text: str) -> None:
    async with serve(ANSWERS) as served:
        answer = await served.ask(verb, content=content.encode(), headers=TEXT)
    # The wrong Content-Length of the response is not sent.
    assert (answer.status_code, answer.text) == (status, text)
    assert answer.headers["x-own"] == {"PUT": "mine", "PATCH": "pot"}[verb]


PLAIN = "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("verb", "content", "kind", "text"),
    [
        ("PATCH", "x", PLAIN, "internal server error"),
        ("PATCH", "x", "application/json", '{"error": "internal server error"}'),
        ("PUT", "a\r\nX-Forged: 1", PLAIN, "internal server error"),
        ("PUT", "\u20ac", PLAIN, "internal server error"),
    ],
    ids=["exception", "exception as JSON", "forged header", "header that is not latin-1"],
)
async def test_an_internal_error_has_no_details(serve: Serve, verb: str, content: str, kind: str, text: str) -> None:
    with capture_logs() as logs:
        async with serve(ANSWERS) as served:
            answer = await served.ask(verb, content=content.encode(), headers={**TEXT, "Accept": kind})
    assert (answer.status_code, answer.headers["content-type"], answer.text) == (500, kind, text)
    assert "x-forged" not in answer.headers
    (error,) = [each for each in logs if each["log_level"] == "error"]
    assert error["exc_info"] if verb == "PATCH" else error["event"] == "invalid handler response"


async def test_an_internal_error_has_details_on_request(serve: Serve) -> None:
    async with serve(ANSWERS, shows_details=True) as served:
        answer = await served.ask("PATCH", content=b"x", headers=TEXT)
    assert answer.status_code == 500
    assert "ValueError: a secret" in answer.text


async def test_a_generator_is_streamed_on_a_kept_connection(serve: Serve) -> None:
    async with serve(ANSWERS) as served:
        async with httpx.AsyncClient(base_url=f"http://{served.address}", timeout=WAIT_SECONDS) as client:
            for count in (3, 0, 500):
                answer = await client.get("/", params={"count": count}, headers=served.lane_headers)
                assert answer.text == "".join(f"{number};" for number in range(count))
        assert served.limit.in_flight == 0


async def test_a_failing_generator_truncates_its_answer(serve: Serve) -> None:
    async with serve(ANSWERS) as served:
        with pytest.raises(httpx.RemoteProtocolError):
            await served.ask("GET", "/?count=3&fail=1")
        await served.wait_in_flight(0)


def _head(served: ServedHandler, line: str, *headers: str) -> bytes:
    lane = [f"{name}: {value}" for name, value in served.lane_headers.items()]
    return "\r\n".join([f"{line} HTTP/1.1", "Host: h", *lane, *headers, "", ""]).encode()


async def test_a_client_that_disconnects_closes_its_generator(serve: Serve) -> None:
    async with serve(ANSWERS, max_concurrency=1) as served:
        async with served.connect() as peer:
            await peer.send(_head(served, "GET /?count=100000000"))
            assert await peer.stream.receive_some()
        assert await trio.to_thread.run_sync(served.instance.closed.wait, WAIT_SECONDS)
        await served.wait_in_flight(0)


async def test_callbacks_run_after_the_complete_answer(serve: Serve) -> None:
    body = b"x" * 20_000_000
    async with serve(ANSWERS) as served:
        async with served.connect() as peer:
            await peer.send(_head(served, "POST /", f"Content-Length: {len(body)}") + body)
            assert await peer.stream.receive_some(100)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not served.instance.done.is_set()
        # A client that disconnects within the answer does not prevent the callback.
        assert await trio.to_thread.run_sync(served.instance.done.wait, WAIT_SECONDS)
        served.instance.done.clear()
        assert (await served.ask(json=[1])).json() == [1]
        assert await trio.to_thread.run_sync(served.instance.done.wait, WAIT_SECONDS)


# Limits

WAITING: Final = """
import threading

class Handler:
    def __init__(self):
        self.resumed = threading.Event()
        self.calls = []

    def handle_post(self, payload):
        self.calls.append(payload)
        if payload == "wait":
            self.resumed.wait(60)
        if payload == "fail":
            raise ValueError
        return payload
"""


async def _post(served: ServedHandler, content: bytes) -> None:
    await served.ask(content=content, headers=TEXT)


async def test_a_call_without_a_free_thread_is_refused_with_a_time_to_retry(serve: Serve) -> None:
    async with (
        serve(WAITING, threads_per_process=1, queue_timeout=0.01) as served,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_post, served, b"wait")
        await until_async(lambda: served.instance.calls == ["wait"])
        answer = await served.ask(content=b"second", headers=TEXT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        served.instance.resumed.set()


async def test_requests_above_max_concurrency_are_refused_until_others_end(serve: Serve) -> None:
    async with serve(WAITING, max_concurrency=2) as served, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(_post, served, b"wait")
        await served.wait_in_flight(2)
        answer = await served.ask(content=b"third", headers=TEXT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["access-control-allow-origin"] == "*"
        assert (await served.ask("GET", "/info")).status_code == 200
        served.instance.resumed.set()
        await served.wait_in_flight(0)
        assert (await served.ask(content=b"fail", headers=TEXT)).status_code == 500
        assert served.limit.in_flight == 0
        assert "third" not in served.instance.calls


async def test_a_request_above_max_concurrency_is_refused_before_its_body(serve: Serve) -> None:
    async with serve(WAITING, max_concurrency=1) as served:
        head = _head(served, "POST /", "Content-Type: text/plain", "Content-Length: 5")
        async with served.connect() as first, served.connect() as second:
            await first.send(head)
            await served.wait_in_flight(1)
            answer = await second.ask(head)
            text = "1 requests are in flight already, which is max_concurrency; try again later"
            assert (answer.status, answer.body.decode()) == (503, text)
        await served.wait_in_flight(0)
        assert (await served.ask(content=b"next", headers=TEXT)).text == "next"
        assert served.limit.in_flight == 0


async def test_a_queued_request_whose_client_disconnects_is_not_called(serve: Serve) -> None:
    async with serve(WAITING) as served, trio.open_nursery() as nursery:
        nursery.start_soon(_post, served, b"wait")
        await served.wait_in_flight(1)
        async with trio.open_nursery() as leaving:
            leaving.start_soon(_post, served, b"cancelled")
            await served.wait_in_flight(2)
            leaving.cancel_scope.cancel()
        await served.wait_in_flight(1)
        served.instance.resumed.set()
        assert (await served.ask(content=b"last", headers=TEXT)).text == "last"
        assert served.instance.calls == ["wait", "last"]


# Request ids

LOGGING: Final = """
import threading
import structlog
from ovmstrio.ext.handlers import Response

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
ID: Final = "x-request-id"


def _ids(logs: list[MutableMapping[str, Any]]) -> set[str]:
    return {line.get("request_id", "") for line in logs if line["log_level"] in {"info", "error"}}


async def _ask_logged(served: ServedHandler, content: str, **headers: bytes | str) -> tuple[httpx.Response, set[str]]:
    sent = TEXT | {name.replace("_", "-"): value for name, value in headers.items()}
    with capture_logs([merge_contextvars]) as logs:
        answer = await served.ask(content=content, headers=sent)
    return answer, _ids(logs)


async def test_a_failed_request_has_a_new_id_in_log_and_answer(serve: Serve) -> None:
    async with serve(LOGGING) as served:
        failures = [await _ask_logged(served, "fail") for _ in range(2)]
        answer, ids = await _ask_logged(served, "x")
    assert len(ids - {""}) == len(ids) == 1
    assert ids == {answer.headers[ID]}
    assert [(each.status_code, found) for each, found in failures] == [
        (500, {each.headers[ID]}) for each, _ in failures
    ]
    assert failures[0][1] != failures[1][1]


@pytest.mark.parametrize(
    ("payload", "sent", "is_kept"),
    [
        ("fail", "a-1", True),
        ("x", "a-1", True),
        *(("fail", each, False) for each in ("", "a b", "x" * 129, "\u00e9")),
    ],
)
async def test_the_id_of_the_client_is_kept_unless_it_is_malformed(
    serve: Serve, payload: str, sent: str, is_kept: bool
) -> None:
    async with serve(LOGGING) as served:
        answer, ids = await _ask_logged(served, payload, X_Request_Id=sent.encode("latin-1"))
    assert ids == {answer.headers[ID]}
    assert (answer.headers[ID] == sent) == is_kept


async def test_callbacks_and_streams_have_the_id_of_their_request(serve: Serve) -> None:
    with capture_logs([merge_contextvars]) as logs:
        async with serve(LOGGING) as served:
            assert (await served.ask("GET", headers={ID: "a-1"})).text == "first"
            assert await trio.to_thread.run_sync(served.instance.done.wait, WAIT_SECONDS)
            with pytest.raises(httpx.RemoteProtocolError):
                await served.ask("PUT", headers={ID: "a-1"})
            await served.wait_in_flight(0)
            served.handler.run_after([trio.lowlevel.checkpoint])
    errors = [line for line in logs if line["log_level"] == "error"]
    assert [line["method"] for line in errors] == ["callback", "handle_put"]
    assert _ids(errors) == {"a-1"}


async def test_a_handler_may_set_the_id(serve: Serve) -> None:
    async with serve(LOGGING) as served:
        answer = await served.ask("DELETE", headers={ID: "a-1"})
    assert answer.headers.get_list(ID) == ["of-the-handler"]
