from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.auth.revocable_streams import RevocableStream
from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.errors import MalformedPayload, NotReady, ServerError, Unauthenticated, UserCodeError
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.ext.handlers import HTTPError, JSONResponse, Response, StreamingResponse
from ovmstrio.handlers.handler_loading import LoadedHandler
from ovmstrio.handlers.http_values import error_response, to_response, wants_json
from ovmstrio.handlers.routes import LeasedStream
from tests.support.projects import opened
from tests.support.waits import until_async

TEXT = (("content-type", "text/plain; charset=utf-8"),)
BYTES = (("content-type", "application/octet-stream"),)
JSON = (("content-type", "application/json"),)
LINES = (("content-type", "application/x-ndjson"),)


def handler_of(body: str, prefix: str = "") -> str:
    head = "import math, numpy\nfrom ovmstrio.ext.handlers import *\nclass Handler:\n    closed = False\n"
    return f"{head}    {prefix}def handle_get(self):\n{indent(body, ' ' * 8)}\n"


async def answer(handler: LoadedHandler) -> HttpAnswer:
    return await to_response(await handler.call("handle_get"), handler, "handle_get")


async def read_body(made: HttpAnswer) -> bytes:
    stream = made.stream
    if stream is None:
        return made.content
    try:
        return b"".join([piece async for piece in stream])
    finally:
        await stream.aclose()


@pytest.mark.parametrize(
    ("result", "headers", "body"),
    [
        ("b'\\x00\\xff'", BYTES, b"\x00\xff"),
        ("bytearray(b'ab')", BYTES, b"ab"),
        ("'h\\u00e9'", TEXT, "hé".encode()),
        ("{'a': [1, 2.5, None, True, 'h\\u00e9']}", JSON, b'{"a": [1, 2.5, null, true, "h\\u00e9"]}'),
        ("None", JSON, b"null"),
        ("[math.nan, math.inf]", JSON, b"[NaN, Infinity]"),
        ("(1, 2)", JSON, b"[1, 2]"),
        ("(1, 2, len)[:2]", JSON, b"[1, 2]"),
        ("[numpy.float32(0.5), numpy.int64(3), numpy.bool_(True)]", JSON, b"[0.5, 3, true]"),
        ("{'y': numpy.arange(4).reshape(2, 2)}", JSON, b'{"y": [[0, 1], [2, 3]]}'),
        ("numpy.arange(2)", JSON, b"[0, 1]"),
    ],
)
async def test_each_type_of_result_has_its_answer(
    tmp_path: Path, result: str, headers: tuple[tuple[str, str], ...], body: bytes
) -> None:
    async with opened(tmp_path, handler_of(f"return {result}")) as handler:
        assert await answer(handler) == HttpAnswer(200, headers, body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return object()", "TypeError: an object of type 'object' is not JSON serializable"),
        ("return {(1, 2): 3}", "TypeError: keys must be"),
        ("endless = []\nendless.append(endless)\nreturn endless", "ValueError: Circular reference"),
        ("return '\\ud800'", "UnicodeEncodeError"),
    ],
)
async def test_results_that_cannot_be_sent_are_errors_of_the_handler(tmp_path: Path, body: str, reason: str) -> None:
    async with opened(tmp_path, handler_of(body)) as handler:
        with capture_logs() as logs, pytest.raises(UserCodeError) as caught:
            await answer(handler)
    assert caught.value.message == "internal server error"
    assert caught.value.detail.startswith(reason)
    assert [entry["error"] for entry in logs] == [caught.value.detail]


async def test_callbacks_are_returned_in_the_order_of_their_wrapping(tmp_path: Path) -> None:
    body = "return (Response('<p>', 404, {'X-Key': 'v'}, 'text/html', background=print), len), max"
    async with opened(tmp_path, handler_of(body)) as handler:
        made: Any = await answer(handler)
    assert (made.status, made.body, made.after) == (404, b"<p>", (print, len, max))
    assert made.headers == (("x-key", "v"), ("content-type", "text/html; charset=utf-8"))


def test_bodies_and_headers_of_responses() -> None:
    assert Response().body == b""
    assert Response(b"x").headers == {}
    assert Response(b"x", headers={"Content-Length": "7"}).header_pairs() == ()
    assert StreamingResponse([b"x"], headers={"Content-Length": "1"}).header_pairs() == (("content-length", "1"),)
    numbers: Any = {"X-Count": 3}
    assert Response("x", headers=numbers).header_pairs() == (("x-count", "3"),)
    assert StreamingResponse([], headers=numbers).header_pairs() == (("x-count", "3"),)
    assert JSONResponse(["é"]).body == '["é"]'.encode()
    given = Response("x", headers={"Content-Type": "text/csv"}, media_type="text/html")
    assert given.header_pairs() == (("content-type", "text/csv"),)
    with pytest.raises(TypeError, match="text or bytes, got dict"):
        Response({})


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize(
    ("values", "headers", "body"),
    [
        ("yield 'h\\u00e9'\nyield b'!'", TEXT, "hé!".encode()),
        ("yield b'a'\nyield 'b'", BYTES, b"ab"),
        ("yield {'a': 1}\nyield [2]\nyield 'x'", LINES, b'{"a": 1}\n[2]\nx'),
        ("return\nyield", BYTES, b""),
        ("for n in range(1000): yield '.'", TEXT, b"." * 1000),
    ],
)
async def test_a_generator_is_a_stream(
    tmp_path: Path, prefix: str, values: str, headers: tuple[tuple[str, str], ...], body: bytes
) -> None:
    async with opened(tmp_path, handler_of(values, prefix)) as handler:
        made = await answer(handler)
        assert (made.status, made.headers) == (200, headers)
        assert await read_body(made) == body


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_generator_that_fails_at_once_has_a_status(tmp_path: Path, prefix: str) -> None:
    async with opened(tmp_path, handler_of("raise HTTPError(404, 'no leaf')\nyield", prefix)) as handler:
        with pytest.raises(HTTPError, match="404: no leaf"):
            await answer(handler)
    async with opened(tmp_path, handler_of("yield 'a'\nyield object()", prefix)) as handler:
        made: Any = await answer(handler)
        assert await anext(made.body) == b"a"
        with pytest.raises(UserCodeError) as caught:
            await anext(made.body)
        assert caught.value.detail.startswith("TypeError: an object of type 'object' is not JSON serializable")


@pytest.mark.parametrize(
    "content",
    ["['a', 'b']", "iter(['a', b'b'])", "self.values()", "self.later()", "'ab'", "b'ab'", "memoryview(b'ab')"],
)
async def test_a_streaming_response_has_any_iterable(tmp_path: Path, content: str) -> None:
    code = handler_of(f"return StreamingResponse({content}, 206, {{'x-a': '1'}}, 'text/event-stream')")
    code += "    def values(self):\n        yield 'a'\n        yield 'b'\n"
    code += "    async def later(self):\n        yield 'a'\n        yield 'b'\n"
    async with opened(tmp_path, code) as handler:
        made = await answer(handler)
        assert (made.status, made.headers) == (
            206,
            (("x-a", "1"), ("content-type", "text/event-stream; charset=utf-8")),
        )
        assert await read_body(made) == b"ab"


async def test_responses_of_starlette(tmp_path: Path) -> None:
    pytest.importorskip("starlette.responses")
    body = """\
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse
made = JSONResponse({"error": "unknown"}, status_code=400, background=BackgroundTask(setattr, self, "closed", 7))
made.set_cookie("a", "1")
return made
"""
    async with opened(tmp_path, handler_of(body)) as handler:
        made = await answer(handler)
        assert (made.status, made.body) == (400, b'{"error":"unknown"}')
        assert [name for name, _ in made.headers] == ["content-type", "set-cookie"]
        handler.run_after(made.after)
        await until_async(lambda: handler.instance.closed == 7)


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_streams_of_starlette(tmp_path: Path, prefix: str) -> None:
    pytest.importorskip("starlette.responses")
    code = handler_of("from starlette.responses import StreamingResponse\nreturn StreamingResponse(self.values(), 202)")
    code += f"    {prefix}def values(self):\n        yield 'h\\u00e9'\n        yield b'!'\n"
    async with opened(tmp_path, code) as handler:
        made = await answer(handler)
        assert made.status == 202
        assert await read_body(made) == "hé!".encode()


async def test_numbers_in_a_stream_of_starlette_are_errors(tmp_path: Path) -> None:
    pytest.importorskip("starlette.responses")
    code = handler_of("from starlette.responses import StreamingResponse\nreturn StreamingResponse([3])")
    async with opened(tmp_path, code) as handler:
        made = await answer(handler)
        with pytest.raises(UserCodeError) as caught:
            await read_body(made)
        assert caught.value.detail.startswith("TypeError: ")


async def test_files_of_starlette(tmp_path: Path) -> None:
    pytest.importorskip("starlette.responses")
    (tmp_path / "large.csv").write_bytes(b"x" * 200_000)
    code = handler_of(
        f"from starlette.responses import FileResponse\nreturn FileResponse({str(tmp_path)!r} + self.name)"
    )
    async with opened(tmp_path, code + "    name = '/large.csv'\n") as handler:
        made = await answer(handler)
        headers = dict(made.headers)
        assert headers["content-length"] == "200000"
        assert headers["content-type"].startswith("text/csv")
        assert await read_body(made) == b"x" * 200_000
        handler.instance.name = "/missing.csv"
        with pytest.raises(UserCodeError) as caught:
            await answer(handler)
        assert "FileNotFoundError" in caught.value.detail


# Errors


@pytest.mark.parametrize(
    ("error", "options", "status", "headers", "body"),
    [
        (MalformedPayload("no value", is_json=True), {}, 500, JSON, b'{"error": "no value"}'),
        (MalformedPayload("no boundary"), {}, 500, TEXT, b"no boundary"),
        (HTTPError(418, "tea", {"X-Pot": "1"}), {}, 418, (*TEXT, ("x-pot", "1")), b"tea"),
        (HTTPError(422, "{}", {"Content-Type": "application/json"}), {}, 422, JSON, b"{}"),
        (HTTPError(404), {}, 404, TEXT, b"Not Found"),
        (HTTPError(404, "no leaf"), {"as_json": True}, 404, TEXT, b"no leaf"),
        (HTTPError(799), {}, 799, TEXT, b""),
        (HTTPError(429, {"left": 0}, {"Retry-After": 3}), {}, 429, (*TEXT, ("retry-after", "3")), b"{'left': 0}"),
        (UserCodeError("internal", detail="why"), {}, 500, TEXT, b"internal"),
        (UserCodeError("internal", detail="why"), {"shows_details": True}, 500, TEXT, b"internal: why"),
        (NotReady("later"), {}, 500, TEXT, b"later"),
        (NotReady("later"), {"as_json": True}, 500, JSON, b'{"error": "later"}'),
    ],
)
def test_answers_of_errors(
    error: ServerError | HTTPError,
    options: dict[str, bool],
    status: int,
    headers: tuple[tuple[str, str], ...],
    body: bytes,
) -> None:
    made = error_response(error, 500, **options)
    assert (made.status, made.headers, made.body) == (status, headers, body)


def test_a_status_without_content_has_no_body() -> None:
    assert error_response(HTTPError(204, "x"), 500).body == b""


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/json", True),
        ("application/json;q=0.9, */*;q=0.1", True),
        ("application/json, text/plain, */*", False),
        ("*/*", False),
        ("", False),
        (None, False),
    ],
)
def test_clients_that_want_json(accept: str | None, expected: bool) -> None:
    assert wants_json(accept) is expected


# Streams that are kept for a request


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    await trio.sleep_forever()


async def test_a_stream_ends_with_the_permission_of_its_caller() -> None:
    request = RevocableStream(Caller("shop", "key", Scopes()), (), None)
    ended: list[str] = []
    stream = LeasedStream(_pieces(b"a", b"b"), known=(request, lambda: ended.append("known")))  # type: ignore[arg-type]
    received: list[bytes] = []

    async def read_all() -> None:
        while True:
            received.append(await anext(stream))

    async def read() -> None:
        with pytest.raises(trio.BrokenResourceError, match="the key is not known"):
            await read_all()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            request.end(Unauthenticated("the key is not known"))
        with pytest.raises(trio.BrokenResourceError):
            await anext(stream)
        await stream.aclose()
        await stream.aclose()
    assert received == [b"a", b"b"]
    assert ended == ["known"]
