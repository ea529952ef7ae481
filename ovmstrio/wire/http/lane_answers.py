"""Answers as the fast lane writes them: whole ones in one piece, others in chunks as they come."""

from __future__ import annotations

import time
from contextlib import aclosing
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from ovmstrio.wire.http.sending import send_bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import trio

    from ovmstrio.runtimes.handlers.http.answers import ByteStream

__all__ = ["LaneAnswer", "send_answer"]

_BODILESS: Final = frozenset({204, 304})
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


class LaneAnswer(Protocol):
    """What the lane sends: ``header_lines`` say nothing of the length or of the connection.

    ``after`` is called once the answer has been sent, or could not be.
    """

    @property
    def status(self) -> int:
        """The status."""
        ...

    @property
    def header_lines(self) -> Iterable[tuple[str, str]]:
        """The headers one by one."""
        ...

    @property
    def body(self) -> bytes | ByteStream:
        """The whole body, or its pieces as they come."""
        ...

    @property
    def after(self) -> Callable[[], None] | None:
        """What is called at the end."""
        ...


async def send_answer(stream: trio.abc.SendStream, answer: LaneAnswer, *, keep_alive: bool) -> None:
    """Send an answer; what a stream gives is sent as it comes, and the stream is closed.

    Raises:
        trio.BrokenResourceError: the connection broke, or the peer took nothing for too long.
            A stream that fails raises it, too: its answer breaks off.

    Cancellation: at any time; the connection is unusable then.
    """
    lines = [f"HTTP/1.1 {answer.status} {_PHRASES.get(answer.status, '')}", f"date: {_date(int(time.time()))}"]
    lines += [f"{name.lower()}: {value}" for name, value in answer.header_lines]
    body = answer.body
    if isinstance(body, bytes):
        if answer.status in _BODILESS:
            body = b""
        else:
            lines.append(f"content-length: {len(body)}")
        await send_bounded(stream, _head(lines, keep_alive=keep_alive) + body)
        return
    lines.append("transfer-encoding: chunked")
    async with aclosing(body):
        await send_bounded(stream, _head(lines, keep_alive=keep_alive))
        async for piece in body:
            if piece:
                await send_bounded(stream, b"%x\r\n%b\r\n" % (len(piece), piece))
    await send_bounded(stream, b"0\r\n\r\n")


def _head(lines: list[str], *, keep_alive: bool) -> bytes:
    if not keep_alive:
        lines.append("connection: close")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
