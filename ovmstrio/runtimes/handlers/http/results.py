"""What a handler's method returned, as an answer.

===================================== ============================================================
result                                answer
===================================== ============================================================
bytes                                 ``application/octet-stream``
text                                  ``text/plain; charset=utf-8``
a ``Response``, ours or Starlette's   as it is, streams and background tasks included
an iterator or generator, async too   a stream; its first value decides the content type
``(result, callback)``                that of the result; the callback runs afterwards
anything else                         ``application/json``, ``None`` as ``null``, ``NaN`` as ``NaN``; arrays, tensors
                                      and scalars of numpy, torch and others with ``tolist`` as lists and numbers
===================================== ============================================================
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from typing import Any, Final, Protocol, Self

from ovmstrio.core.http import ByteStream, HttpAnswer
from ovmstrio.runtimes.handlers.http.responses import Response, StreamingResponse
from ovmstrio.runtimes.handlers.http.starlette import starlette_answer

__all__ = ["ResultBorder", "to_answer"]

_BYTES: Final = "application/octet-stream"
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_LINES: Final = "application/x-ndjson"


class ResultBorder(Protocol):
    """The handler that a result comes from, as far as making an answer needs it."""

    def stream(self, values: Any, convert: Callable[[Any], bytes], step: str) -> ByteStream:
        """Run an iterator of the user's where it belongs, a bounded number of values ahead."""
        ...

    def failure(self, error: BaseException, step: str) -> Exception:
        """Log what user code is to blame for, and make of it what is raised instead."""
        ...


async def to_answer(result: Any, handler: ResultBorder, method: str) -> HttpAnswer:
    """Make the answer of what a method returned.

    Args:
        result: the method's.
        handler: whose method it is.
        method: its name, for the log.

    Raises:
        UserCodeError: the result cannot be sent, or its generator raised before its first value; it has been logged.
        HTTPError: its generator raised this before its first value.

    Ownership: a stream in the answer is the caller's to close.

    Cancellation: while a generator makes its first value; it is closed then.
    """
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):  # noqa: PLR2004 - result and callback
        return (await to_answer(result[0], handler, method)).followed_by(result[1])
    if isinstance(result, Iterator | AsyncIterator):
        return await _streamed(result, handler, method)
    try:
        return await starlette_answer(result, handler.stream, method) or _plain(result, handler, method)
    except (TypeError, ValueError, RecursionError, OSError) as error:
        raise handler.failure(error, method) from None


def _plain(result: Any, handler: ResultBorder, method: str) -> HttpAnswer:
    if isinstance(result, bytes | bytearray | memoryview):
        return _of_type(_BYTES, bytes(result))
    if isinstance(result, str):
        return _of_type(_TEXT, result.encode())
    if isinstance(result, Response):
        return _response(result, handler, method)
    return _of_type(_JSON, _encode_json(result))


def _response(response: Response, handler: ResultBorder, method: str) -> HttpAnswer:
    after = () if response.background is None else (response.background,)
    body: bytes | ByteStream = response.body
    if isinstance(response, StreamingResponse):
        chunks = response.chunks
        values = aiter(chunks) if isinstance(chunks, AsyncIterable) else iter(chunks)
        body = handler.stream(values, _encode, method)
    return HttpAnswer(response.status_code, response.header_pairs(), body, after)


def _of_type(kind: str, body: bytes | ByteStream) -> HttpAnswer:
    return HttpAnswer(200, (("content-type", kind),), body)


def _encode_json(value: Any) -> bytes:
    return _encoder.encode(value).encode()


def _listed(value: Any) -> Any:
    """Give what JSON has for arrays and their scalars."""
    try:
        return value.tolist()
    except AttributeError:
        raise TypeError(f"an object of type {type(value).__name__!r} cannot be written as JSON") from None


_encoder: Final = json.JSONEncoder(default=_listed)


# Streams


async def _streamed(values: Any, handler: ResultBorder, method: str) -> HttpAnswer:
    chunks = _Chunks()
    stream = handler.stream(values, chunks.encode, method)
    try:
        first = await anext(stream)
    except StopAsyncIteration:
        return _of_type(_BYTES, b"")
    except BaseException:
        await stream.aclose()
        raise
    return _of_type(chunks.kind, _Begun(first, stream))


def _encode(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return _encode_json(value) + b"\n"


class _Chunks:
    """Encodes what a generator yields; ``kind`` is the content type that its first value asks for."""

    def __init__(self) -> None:
        self.kind = ""

    def encode(self, value: Any) -> bytes:
        """Encode one value; in the thread that made it."""
        if not self.kind:
            is_bytes = isinstance(value, bytes | bytearray | memoryview)
            self.kind = _TEXT if isinstance(value, str) else _BYTES if is_bytes else _LINES
        return _encode(value)


class _Begun:
    """A stream whose first piece has been taken."""

    def __init__(self, first: bytes, rest: ByteStream) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        """Stop the stream.

        Cancellation: as the stream's.
        """
        await self._rest.aclose()
