"""What handlers return, as answers."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import UserCodeError
from ovmstrio.core.http import HttpAnswer
from ovmstrio.handlers import HTTPError, JSONResponse, Response, StreamingResponse
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.http.results import to_answer
from tests.support.projects import opened
from tests.support.waits import until_async

TEXT = (("content-type", "text/plain; charset=utf-8"),)
BYTES = (("content-type", "application/octet-stream"),)
JSON = (("content-type", "application/json"),)
LINES = (("content-type", "application/x-ndjson"),)


def handler_of(body: str, prefix: str = "") -> str:
    """Write a handler with one method."""
    head = "import math, numpy\nfrom ovmstrio.handlers import *\nclass Handler:\n    closed = False\n"
    return f"{head}    {prefix}def handle_get(self):\n{indent(body, ' ' * 8)}\n"


async def answer(handler: LoadedHandler) -> HttpAnswer:
    """Call the method and make the answer."""
    return await to_answer(await handler.call("handle_get"), handler, "handle_get")


async def whole(made: HttpAnswer) -> bytes:
    """Read the body of an answer."""
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
async def test_each_kind_of_result_has_its_answer(
    tmp_path: Path, result: str, headers: tuple[tuple[str, str], ...], body: bytes
) -> None:
    """Bytes, text, and JSON for everything else, arrays included."""
    async with opened(tmp_path, handler_of(f"return {result}")) as handler:
        assert await answer(handler) == HttpAnswer(200, headers, body)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("object()", "TypeError: an object of type 'object' cannot be written as JSON"),
        ("{(1, 2): 3}", "TypeError: keys must be"),
        ("self.endless()", "ValueError: Circular reference"),
        ("'\\ud800'", "UnicodeEncodeError"),
    ],
)
async def test_what_cannot_be_sent_is_the_handlers_fault(tmp_path: Path, result: str, reason: str) -> None:
    """The log says why, the client is not told."""
    code = (
        handler_of(f"return {result}")
        + "    def endless(self):\n        a = []\n        a.append(a)\n        return a\n"
    )
    async with opened(tmp_path, code) as handler:
        with capture_logs() as logs, pytest.raises(UserCodeError) as caught:
            await answer(handler)
    assert caught.value.message == "internal server error"
    assert caught.value.detail.startswith(reason)
    assert [entry["error"] == caught.value.detail for entry in logs] == [True]


async def test_a_callback_comes_with_its_result(tmp_path: Path) -> None:
    """Whatever the result is; several are in the order in which they were wrapped."""
    async with opened(tmp_path, handler_of("return (JSONResponse({}, 201), len), max")) as handler:
        made: Any = await answer(handler)
    assert (made.status, made.body, made.after) == (201, b"{}", (len, max))


async def test_a_response_is_sent_as_it_is(tmp_path: Path) -> None:
    """With its status, its headers and its background task."""
    body = "return Response('<p>', 404, {'X-Key': 'v'}, 'text/html', background=len)"
    async with opened(tmp_path, handler_of(body)) as handler:
        made: Any = await answer(handler)
    assert (made.status, made.body, made.after) == (404, b"<p>", (len,))
    assert made.headers == (("x-key", "v"), ("content-type", "text/html; charset=utf-8"))


def test_responses_make_their_bodies() -> None:
    """Of text, bytes or JSON; nothing else."""
    assert Response().body == b""
    assert Response(b"x").headers == {}
    assert Response(b"x", headers={"Content-Length": "7"}).header_pairs() == ()
    assert StreamingResponse([b"x"], headers={"Content-Length": "1"}).header_pairs() == (("content-length", "1"),)
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
    """Whose content type is that of its first value."""
    async with opened(tmp_path, handler_of(values, prefix)) as handler:
        made = await answer(handler)
        assert (made.status, made.headers) == (200, headers)
        assert await whole(made) == body


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_generator_that_fails_at_once_is_an_error(tmp_path: Path, prefix: str) -> None:
    """With a status, as nothing has been sent; later it ends the stream."""
    async with opened(tmp_path, handler_of("raise HTTPError(404, 'gone')\nyield", prefix)) as handler:
        with pytest.raises(HTTPError, match="404: gone"):
            await answer(handler)
    async with opened(tmp_path, handler_of("yield 'a'\nyield object()", prefix)) as handler:
        made: Any = await answer(handler)
        assert await anext(made.body) == b"a"
        with pytest.raises(UserCodeError) as caught:
            await anext(made.body)
        assert caught.value.detail.startswith("TypeError: an object of type 'object' cannot be written as JSON")


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_stream_that_nobody_reads_on_is_closed(tmp_path: Path, prefix: str) -> None:
    """When its answer is."""
    body = "try:\n    while True: yield 'x'\nfinally:\n    self.closed = True"
    async with opened(tmp_path, handler_of(body, prefix)) as handler:
        made: Any = await answer(handler)
        assert await anext(made.body) == b"x"
        await made.body.aclose()
        await until_async(lambda: handler.instance.closed)


async def test_who_leaves_before_the_first_value_closes_the_generator(tmp_path: Path) -> None:
    """As later."""
    body = "import trio\ntry:\n    await trio.sleep(60)\n    yield 1\nfinally:\n    self.closed = True"
    async with opened(tmp_path, handler_of(body, "async ")) as handler:
        with trio.move_on_after(0.01):
            await answer(handler)
        assert handler.instance.closed


@pytest.mark.parametrize("content", ["['a', 'b']", "iter(['a', b'b'])", "self.values()", "self.later()"])
async def test_a_streaming_response_has_any_iterable(tmp_path: Path, content: str) -> None:
    """And its own content type."""
    code = handler_of(f"return StreamingResponse({content}, 206, {{'x-a': '1'}}, 'text/event-stream')")
    code += "    def values(self):\n        yield 'a'\n        yield 'b'\n"
    code += "    async def later(self):\n        yield 'a'\n        yield 'b'\n"
    async with opened(tmp_path, code) as handler:
        made = await answer(handler)
        assert (made.status, made.headers) == (
            206,
            (("x-a", "1"), ("content-type", "text/event-stream; charset=utf-8")),
        )
        assert await whole(made) == b"ab"


async def test_starlettes_responses_are_sent_as_they_are(tmp_path: Path) -> None:
    """Status, headers, cookies and background."""
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
async def test_starlettes_streams_are_streams(tmp_path: Path, prefix: str) -> None:
    """Of text in its charset, or of bytes."""
    pytest.importorskip("starlette.responses")
    code = handler_of("from starlette.responses import StreamingResponse\nreturn StreamingResponse(self.values(), 202)")
    code += f"    {prefix}def values(self):\n        yield 'h\\u00e9'\n        yield b'!'\n"
    async with opened(tmp_path, code) as handler:
        made = await answer(handler)
        assert made.status == 202
        assert await whole(made) == "hé!".encode()


async def test_starlettes_files_are_sent(tmp_path: Path) -> None:
    """With their length and type; a file that is not there is the handler's fault."""
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
        assert await whole(made) == b"x" * 200_000
        handler.instance.name = "/missing.csv"
        with pytest.raises(UserCodeError) as caught:
            await answer(handler)
        assert "FileNotFoundError" in caught.value.detail
