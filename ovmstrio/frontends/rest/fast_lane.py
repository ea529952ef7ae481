"""The short way for inferences over HTTP/1.1: read the request, infer, write the answer, without any framework.

Only the plainest well-formed request is taken: ``POST /v2/models/{m}[/versions/{v}]/infer`` or TensorFlow Serving's
``POST /v1/models/{m}[/versions/{v}]:predict``, with one ``Content-Length`` and nothing unusual in its head.  At the
first request that is anything else, the connection leaves the lane for good, with every byte that has been read, so
that all judging of odd input is done by one careful parser.

::

    socket ─> reader task ─> buffer ─> head, body ─> answer_infer, answer_predict ─> socket
                 │ end of stream: the call in progress is cancelled

A client that closes its sending side while it waits cannot be told from one that is gone; its call is cancelled.  A
request that was complete before that is answered.
"""

from __future__ import annotations

import re
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import trio

from ovmstrio.frontends.rest.infer_route import answer_infer
from ovmstrio.frontends.rest.sending import send_bounded
from ovmstrio.frontends.rest.tensorflow.predict_route import answer_predict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.dataplane import DataPlane
    from ovmstrio.frontends.rest.answers import Answer
    from ovmstrio.observability.events import Api

__all__ = ["FastLane", "InferHead", "parse_head"]

MAX_HEAD_BYTES: Final = 16 * 1024
MAX_WAITING_BYTES: Final = 64 * 1024
"""Bytes of later, pipelined requests that may wait while one is answered."""

IDLE_SECONDS: Final = 75.0
HEAD_SECONDS: Final = 30.0
"""Time that a head may take from its first byte to its last."""
RECEIVE_SECONDS: Final = 30.0
"""Time that may pass between two pieces of a body."""

_CACHED_HEAD_BYTES: Final = 1024
_PREFIXES: Final = (b"POST /v1/models/", b"POST /v2/models/")
_APIS: Final[Mapping[tuple[bytes, bytes], Api]] = {
    (b"v2", b"/infer"): "KServe",
    (b"v1", b":predict"): "TensorFlowServing",
}
_HEAD: Final = re.compile(
    rb"POST /(v[12])/models/([^/?#\x00-\x20\x7f]+?)(?:/versions/([0-9]{1,19}))?(/infer|:predict) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\r\n\x00]*\r\n)+)\r\n"
)
_LENGTH: Final = re.compile(r"[0-9]{1,15}")
_UNUSUAL: Final = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te", "origin"})
_SINGLE: Final = frozenset({"host", "content-length", "connection", "inference-header-content-length"})


class InferHead(NamedTuple):
    """The head of a request that the lane takes."""

    api: Api
    model: str
    version: str
    body_length: int
    json_length: str | None
    keep_alive: bool


def _parse_head(head: bytes) -> InferHead | None:
    match = _HEAD.fullmatch(head)
    api = _APIS.get((match[1], match[4])) if match is not None else None
    if match is None or api is None:
        return None
    headers: dict[str, str] = {}
    for line in match[5].decode("latin-1").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name in _UNUSUAL or (name in _SINGLE and name in headers):
            return None
        headers[name] = value.strip(" \t")
    length = headers.get("content-length", "")
    connection = headers.get("connection", "keep-alive").lower()
    if "host" not in headers or not _LENGTH.fullmatch(length) or connection not in {"keep-alive", "close"}:
        return None
    try:
        model = unquote(match[2].decode("ascii"), errors="strict")
    except UnicodeDecodeError:
        return None
    if "/" in model or ".." in model:
        return None
    version = (match[3] or b"").decode()
    json_length = headers.get("inference-header-content-length")
    return InferHead(api, model, version, int(length), json_length, connection == "keep-alive")


_parse_small_head = lru_cache(maxsize=1024)(_parse_head)


def parse_head(head: bytes) -> InferHead | None:
    """Read a head, blank line included; None for one that the lane does not take.

    A client sends the same head again and again, so small ones are remembered.
    """
    return _parse_small_head(head) if len(head) <= _CACHED_HEAD_BYTES else _parse_head(head)


class FastLane:
    """One connection for as long as it stays in the lane.

    Args:
        plane: what is served.
        stream: the connection, which stays the caller's.
        max_body_bytes: larger bodies leave the lane.
    """

    def __init__(self, plane: DataPlane, stream: trio.abc.Stream, max_body_bytes: int) -> None:
        self._plane = plane
        self._stream = stream
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()
        self._wanted = 0
        self._ended = False
        self._draining = False
        self._idle = True
        self._arrived = trio.Event()
        self._room = trio.Event()
        self._lane: trio.CancelScope | None = None
        self._call: trio.CancelScope | None = None

    async def run(self) -> bytes | None:
        """Answer requests until the connection is over; the bytes of a request that is not for the lane are given.

        Raises:
            trio.BrokenResourceError: the connection broke while an answer was sent.

        Cancellation: at any checkpoint; a call in progress is cancelled with it.
        """
        leaves = False
        async with trio.open_nursery() as nursery:
            self._lane = nursery.cancel_scope
            nursery.start_soon(self._read)
            leaves = await self._serve()
            nursery.cancel_scope.cancel()
        # Only now: the reader may have held bytes when it was told to end, and has put them into the buffer since.
        return bytes(self._buffer) if leaves else None

    def drain(self) -> None:
        """Close the connection after the answer in progress, at once if there is none."""
        self._draining = True
        if self._idle and self._lane is not None:
            self._lane.cancel()

    # Reading

    async def _read(self) -> None:
        while not self._ended:
            if len(self._buffer) >= max(self._wanted, MAX_WAITING_BYTES):
                self._room = trio.Event()
                await self._room.wait()
                continue
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            self._buffer += data
            self._ended = not data
            self._arrived.set()
        if self._call is not None:
            self._call.cancel()

    async def _more(self, deadline: float) -> bool:
        """Wait for bytes; False when there will be none."""
        if self._ended:
            return False
        known = len(self._buffer)
        self._set_deadline(deadline)
        self._arrived = trio.Event()
        self._room.set()
        await self._arrived.wait()
        return len(self._buffer) > known

    # Serving

    async def _serve(self) -> bool:
        """Answer until the connection is over (False) or leaves the lane (True)."""
        while True:
            self._idle = not self._buffer
            if self._idle and self._draining:
                return False
            if not self._buffer and not await self._more(trio.current_time() + IDLE_SECONDS):
                return False
            self._idle = False
            head = await self._head()
            if head is None:
                return True
            body = await self._body(head.body_length)
            if body is None:
                return False
            answer = await self._answer(head, body)
            if answer is None:
                return False
            keep_alive = head.keep_alive and not self._draining
            await send_bounded(self._stream, _render(answer, keep_alive=keep_alive))
            if not keep_alive:
                return False

    async def _head(self) -> InferHead | None:
        """Take the head off the buffer; None, with the buffer as it is, for a request that is not for the lane."""
        buffer = self._buffer
        deadline = trio.current_time() + HEAD_SECONDS
        while True:
            if not buffer.startswith(tuple(prefix[: len(buffer)] for prefix in _PREFIXES)):
                return None
            end = buffer.find(b"\r\n\r\n")
            if end >= 0:
                break
            if len(buffer) > MAX_HEAD_BYTES or not await self._more(deadline):
                return None
        head = parse_head(bytes(buffer[: end + 4])) if end <= MAX_HEAD_BYTES else None
        if head is None or head.body_length > self._max_body_bytes:
            return None
        del buffer[: end + 4]
        return head

    async def _body(self, length: int) -> bytes | None:
        self._wanted = length
        while len(self._buffer) < length:
            if not await self._more(trio.current_time() + RECEIVE_SECONDS):
                return None
        self._wanted = 0
        body = bytes(self._buffer) if len(self._buffer) == length else bytes(self._buffer[:length])
        del self._buffer[:length]
        self._room.set()
        return body

    async def _answer(self, head: InferHead, body: bytes) -> Answer | None:
        """Infer; None when the client left meanwhile."""
        self._set_deadline(float("inf"))
        with trio.CancelScope() as self._call:
            if head.api == "KServe":
                answer = await answer_infer(self._plane, head.model, head.version, body, head.json_length)
            else:
                answer = await answer_predict(self._plane, head.model, head.version, body)
        gone = self._call.cancelled_caught
        self._call = None
        return None if gone else answer

    def _set_deadline(self, deadline: float) -> None:
        if self._lane is not None:
            self._lane.deadline = deadline


def _render(answer: Answer, *, keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", f"date: {_date(int(time.time()))}"]
    lines += [f"{name.lower()}: {value}" for name, value in answer.headers.items()]
    lines.append(f"content-length: {len(answer.body)}")
    if not keep_alive:
        lines.append("connection: close")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1") + answer.body


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
