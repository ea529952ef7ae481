"""Results of handler methods: the response classes that handlers return, and their conversion to responses.

The classes have the names of Starlette's::

    from ovmstrio.ext.handlers import HTTPError, JSONResponse

    def handle_post(self, payload):
        if "text" not in payload:
            raise HTTPError(422, "the field text is missing")
        return JSONResponse({"length": len(payload["text"])}, status_code=201)
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final, Self

from ovmstrio.core.http_messages import ByteStream, HttpAnswer
from ovmstrio.handlers.http_responses import Response, StreamingResponse
from ovmstrio.handlers.starlette_responses import convert_starlette_response

if TYPE_CHECKING:
    from ovmstrio.handlers.handler_calls import HandlerCalls

# Starlette's responses and errors, from handlers that import Starlette


# Conversion of results

_BYTES: Final = "application/octet-stream"
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_LINES: Final = "application/x-ndjson"


async def to_response(result: Any, handler: HandlerCalls, method: str) -> HttpAnswer:
    """Convert the result of a method to a response; the caller closes a streamed body.

    Raises:
        UserCodeError: the result cannot be sent, or its generator raised before the first value; this has been logged.
        HTTPError: raised by the generator before the first value.
    """
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):  # noqa: PLR2004 - result and callback
        return (await to_response(result[0], handler, method)).followed_by(result[1])
    if isinstance(result, Iterator | AsyncIterator):
        return await _stream_values(result, handler, method)
    try:
        return await convert_starlette_response(result, handler.stream, method) or _buffered(result, handler, method)
    except (TypeError, ValueError, RecursionError, OSError) as error:
        raise handler.convert_error(error, method) from None


def _buffered(result: Any, handler: HandlerCalls, method: str) -> HttpAnswer:
    if isinstance(result, bytes | bytearray | memoryview):
        return _ok(_BYTES, bytes(result))
    if isinstance(result, str):
        return _ok(_TEXT, result.encode())
    if isinstance(result, Response):
        return _response(result, handler, method)
    return _ok(_JSON, _encode_json(result))


def _response(response: Response, handler: HandlerCalls, method: str) -> HttpAnswer:
    after = () if response.background is None else (response.background,)
    body: bytes | ByteStream = response.body
    if isinstance(response, StreamingResponse):
        chunks = response.chunks
        values = aiter(chunks) if isinstance(chunks, AsyncIterable) else iter(chunks)
        body = handler.stream(values, _encode, method)
    return HttpAnswer(response.status_code, response.header_pairs(), body, after)


def _ok(kind: str, body: bytes | ByteStream) -> HttpAnswer:
    return HttpAnswer(200, (("content-type", kind),), body)


def _encode_json(value: Any) -> bytes:
    return _JSON_ENCODER.encode(value).encode()


def _array_to_list(value: Any) -> Any:
    try:
        return value.tolist()
    except AttributeError:
        raise TypeError(f"an object of type {type(value).__name__!r} is not JSON serializable") from None


_JSON_ENCODER: Final = json.JSONEncoder(default=_array_to_list)


# Streams


async def _stream_values(values: Any, handler: HandlerCalls, method: str) -> HttpAnswer:
    chunks = _Chunks()
    stream = handler.stream(values, chunks.encode, method)
    try:
        first = await anext(stream)
    except StopAsyncIteration:
        return _ok(_BYTES, b"")
    except BaseException:
        await stream.aclose()
        raise
    return _ok(chunks.kind, _StartedStream(first, stream))


def _encode(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return _encode_json(value) + b"\n"


class _Chunks:
    def __init__(self) -> None:
        self.kind = ""

    def encode(self, value: Any) -> bytes:
        if not self.kind:
            is_bytes = isinstance(value, bytes | bytearray | memoryview)
            self.kind = _TEXT if isinstance(value, str) else _BYTES if is_bytes else _LINES
        return _encode(value)


class _StartedStream:
    def __init__(self, first: bytes, rest: ByteStream) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        await self._rest.aclose()
