"""HTTP where Ray's proxy has the wire: requests come as values, and go as a status, headers and a body or pieces."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from ovmstrio.core.callers import Need, leave_caller
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.http import BODILESS, ByteStream, Headers, HttpAnswer, HttpRequest
from ovmstrio.core.limits import current_place, leave_place
from ovmstrio.transport.http.responses import error_answer, size_refusal

if TYPE_CHECKING:
    from ovmstrio.transport.http.router import Route, Router

__all__ = ["BodyPieces", "HttpDoor", "HttpHead"]

log = structlog.get_logger(__name__)

_OF_ONE_PROCESS: Final = (
    "it is about one process of a cluster, and Ray answers for all: `serve status` tells what runs, Ray's own metrics "
    "count its requests, and `ovms deploy ray` changes what is served"
)
_OTHERS: Final = frozenset({"/metrics", "/v2/models/stats"})
_STATS: Final = "/stats"
_PIECES: Final = 16
"""How many pieces of a body may wait for whoever sends them."""


_Pieces = trio.MemoryReceiveChannel[bytes | None]
"""Pieces of a body, and None in place of its end where it broke off."""


class BodyPieces:
    """The pieces of a body, which is closed with whoever drops this: clients leave between two threads, too.

    Args:
        channel: where they come from.
    """

    def __init__(self, channel: _Pieces) -> None:
        self._channel = channel
        dropped = weakref.finalize(self, _close_soon, trio.lowlevel.current_trio_token(), channel)
        dropped.atexit = False

    async def receive(self) -> bytes:
        """Give the next piece.

        Raises:
            trio.EndOfChannel: that was all.
            trio.BrokenResourceError: the body broke off, and must not be taken for whole.

        Cancellation: while there is none.
        """
        piece = await self._channel.receive()
        if piece is None:
            raise trio.BrokenResourceError("the answer broke off; the server's log has the details")
        return piece

    async def aclose(self) -> None:
        """Have no more made; may be called twice."""
        await self._channel.aclose()


def _close_soon(token: trio.lowlevel.TrioToken, channel: _Pieces) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(channel.close)


class HttpHead(NamedTuple):
    """An answer: its body, or where the pieces of its body come from."""

    status: int
    headers: Headers
    body: bytes
    pieces: BodyPieces | None = None


_Begun = tuple[HttpHead, _Pieces | None]


class HttpDoor:
    """Answers requests by the server's one table of paths, on the trio side.

    Args:
        router: that table.
        tasks: owns streams; outlives them.
        max_body_bytes: larger bodies are refused.

    Attributes:
        max_body_bytes: likewise.
    """

    def __init__(self, router: Router, tasks: trio.Nursery, max_body_bytes: int) -> None:
        self._router = router
        self._tasks = tasks
        self.max_body_bytes = max_body_bytes

    async def answer(self, request: HttpRequest) -> HttpHead:
        """Answer a request, whose ``target`` says what is asked for; a stream goes on until its pieces are dropped.

        The place that a request has been given is held until its answer has ended.

        Cancellation: that of the request.
        """
        target, _, query = request.target.partition("?")
        route = self._router.find(request.method, target)
        request = request._replace(query=query)
        if isinstance(route, HttpAnswer):
            return _whole(await self._router.refuse(route, request))
        request = request._replace(path=route.path, mount=route.mount)
        if refusal := self._refusal(route, request):
            return _whole(self._router.shared(route.refuse(refusal), request.header("origin") or ""))
        if route.is_hot and not route.has_tasks:
            return await self._answer(route, request)
        return _guarded(await self._tasks.start(self._answer_as_task, route, request))

    async def refuse(self, request: HttpRequest, error: Exception) -> HttpHead:
        """Answer for what a request has met before it came here, in the form of whose path it is."""
        route = self._router.find(request.method, request.target.partition("?")[0])
        return _whole(error_answer(error) if isinstance(route, HttpAnswer) else route.refuse(error))

    def _refusal(self, route: Route, request: HttpRequest) -> Exception | None:
        if not route.mount and (route.need in {Need.ADMIN, Need.METRICS} or _is_of_one(route.path)):
            return NotSupported(f"{request.method} {route.path}: {_OF_ONE_PROCESS}")
        size = len(request.body)
        return size_refusal(size, self.max_body_bytes) if size > self.max_body_bytes else None

    async def _answer(self, route: Route, request: HttpRequest) -> HttpHead:
        """Answer a request whose answer is whole; one that turns out to be a stream is sent by a task of its own."""
        try:
            answer = await self._admitted(route, request)
            if answer.stream is None:
                return _whole(answer)
            begun = await self._tasks.start(self._send_held, answer)
            # It is the task's now.
            current_place.set(None)
            return _guarded(begun)
        finally:
            _leave()

    async def _answer_as_task(
        self, route: Route, request: HttpRequest, *, task_status: trio.TaskStatus[_Begun]
    ) -> None:
        try:
            async with trio.open_nursery() as tasks:
                request = request._replace(tasks=tasks if route.has_tasks else None)
                await self._send_as_task(await self._admitted(route, request), task_status=task_status)
                tasks.cancel_scope.cancel()
        finally:
            _leave()

    async def _send_held(self, answer: HttpAnswer, *, task_status: trio.TaskStatus[_Begun]) -> None:
        try:
            await self._send_as_task(answer, task_status=task_status)
        finally:
            _leave()

    async def _admitted(self, route: Route, request: HttpRequest) -> HttpAnswer:
        return await self._router.admit(route, request) or await self._router.answer(route, request)

    async def _send_as_task(self, answer: HttpAnswer, *, task_status: trio.TaskStatus[_Begun]) -> None:
        stream = answer.stream
        if stream is None:
            task_status.started((_whole(answer), None))
            return
        send, receive = trio.open_memory_channel[bytes | None](_PIECES)
        try:
            with send:
                task_status.started((HttpHead(answer.status, answer.headers, b""), receive))
                if answer.status not in BODILESS:
                    await _pass_on(stream, send)
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()
            for callback in answer.after:
                callback()


async def _pass_on(stream: ByteStream, send: trio.MemorySendChannel[bytes | None]) -> None:
    """Give the pieces of a stream; what it fails with is told as a body that broke off, and ends nothing else."""
    with suppress(trio.BrokenResourceError):
        try:
            async for piece in stream:
                try:
                    await send.send(piece)
                except trio.BrokenResourceError:
                    return  # Nobody wants the rest.
        except Exception as error:
            if not isinstance(error, trio.BrokenResourceError):
                log.exception("an answer broke off")
            await send.send(None)


def _leave() -> None:
    leave_place()
    leave_caller()


def _guarded(begun: _Begun) -> HttpHead:
    # What the task itself refers to would never be dropped.
    head, channel = begun
    return head if channel is None else head._replace(pieces=BodyPieces(channel))


def _is_of_one(path: str) -> bool:
    return path in _OTHERS or path.endswith(_STATS)


def _whole(answer: HttpAnswer) -> HttpHead:
    for callback in answer.after:
        callback()
    if answer.stream is not None:
        answer = replace(answer, body=b"")
    return HttpHead(answer.status, answer.headers, answer.content)
