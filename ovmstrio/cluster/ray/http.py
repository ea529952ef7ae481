"""HTTP requests forwarded by Ray's proxy as values."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from ovmstrio.core.callers import Permission, release_caller
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.http_messages import STATUSES_WITHOUT_BODY, ByteStream, Headers, HttpAnswer, HttpRequest
from ovmstrio.core.limits import current_ticket, release_current_ticket
from ovmstrio.transport.http.responses import body_too_large_error, error_response

if TYPE_CHECKING:
    from ovmstrio.transport.http.router import Route, Router

log = structlog.get_logger(__name__)

_NOT_IN_CLUSTER: Final = (
    "not available in a cluster: use `serve status` for the state, Ray's metrics for "
    "requests, and `ovms deploy ray` for changes"
)
_PROCESS_PATHS: Final = frozenset({"/metrics", "/v2/models/stats"})
_STATS: Final = "/stats"
_MAX_CHUNKS: Final = 16
"""Maximum buffered chunks of a response body."""


_Pieces = trio.MemoryReceiveChannel[bytes | None]
"""Chunks of a body; None instead of the end of an incomplete body."""


class BodyChunks:
    """Chunks of a response body; closed when garbage collected, as clients may disconnect between two threads."""

    def __init__(self, channel: _Pieces) -> None:
        self._channel = channel
        dropped = weakref.finalize(self, _close_soon, trio.lowlevel.current_trio_token(), channel)
        dropped.atexit = False

    async def receive(self) -> bytes:
        """Return the next chunk.

        Raises:
            trio.EndOfChannel: end of the body.
            trio.BrokenResourceError: the body is incomplete.
        """
        piece = await self._channel.receive()
        if piece is None:
            raise trio.BrokenResourceError("incomplete response; see the server's log")
        return piece

    async def aclose(self) -> None:
        """Stop the producer; idempotent."""
        await self._channel.aclose()


def _close_soon(token: trio.lowlevel.TrioToken, channel: _Pieces) -> None:
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(channel.close)


class HttpHead(NamedTuple):
    """Response with a complete body, or its chunks."""

    status: int
    headers: Headers
    body: bytes
    pieces: BodyChunks | None = None


_Begun = tuple[HttpHead, _Pieces | None]


class ClusterHttpHandler:
    """HTTP handler with the server's router, on the trio side.

    Args:
        tasks: nursery of streamed responses.
    """

    def __init__(self, router: Router, tasks: trio.Nursery, max_body_bytes: int) -> None:
        self._router = router
        self._tasks = tasks
        self.max_body_bytes = max_body_bytes

    async def answer(self, request: HttpRequest) -> HttpHead:
        """Answer a request for ``target``; a streamed response runs until its chunks are dropped.

        The admission ticket is held until the end of the response.
        """
        target, _, query = request.target.partition("?")
        route = self._router.find(request.method, target)
        request = request._replace(query=query)
        if isinstance(route, HttpAnswer):
            return _complete(await self._router.refuse(route, request))
        request = request._replace(path=route.path, mount=route.mount)
        if refusal := self._refusal(route, request):
            return _complete(self._router.shared(route.refuse(refusal), request.headers))
        if route.is_hot and not route.has_tasks:
            return await self._answer(route, request)
        return _with_chunks(await self._tasks.start(self._answer_as_task, route, request))

    async def refuse(self, request: HttpRequest, error: Exception) -> HttpHead:
        """Return the response for an error before the handler, in the format of the path's API."""
        route = self._router.find(request.method, request.target.partition("?")[0])
        return _complete(error_response(error) if isinstance(route, HttpAnswer) else route.refuse(error))

    def _refusal(self, route: Route, request: HttpRequest) -> Exception | None:
        if not route.mount and (route.need in {Permission.ADMIN, Permission.METRICS} or _is_per_process(route.path)):
            return NotSupported(f"{request.method} {route.path}: {_NOT_IN_CLUSTER}")
        size = len(request.body)
        return body_too_large_error(size, self.max_body_bytes) if size > self.max_body_bytes else None

    async def _answer(self, route: Route, request: HttpRequest) -> HttpHead:
        """Answer a request of a hot route; a streamed response is sent by a task."""
        try:
            answer = await self._admit_and_answer(route, request)
            if answer.stream is None:
                return _complete(answer)
            begun = await self._tasks.start(self._send_held, answer)
            # The task releases the ticket.
            current_ticket.set(None)
            return _with_chunks(begun)
        finally:
            _leave()

    async def _answer_as_task(
        self, route: Route, request: HttpRequest, *, task_status: trio.TaskStatus[_Begun]
    ) -> None:
        try:
            async with trio.open_nursery() as tasks:
                request = request._replace(tasks=tasks if route.has_tasks else None)
                await self._send_as_task(await self._admit_and_answer(route, request), task_status=task_status)
                tasks.cancel_scope.cancel()
        finally:
            _leave()

    async def _send_held(self, answer: HttpAnswer, *, task_status: trio.TaskStatus[_Begun]) -> None:
        try:
            await self._send_as_task(answer, task_status=task_status)
        finally:
            _leave()

    async def _admit_and_answer(self, route: Route, request: HttpRequest) -> HttpAnswer:
        return await self._router.admit(route, request) or await self._router.answer(route, request)

    async def _send_as_task(self, answer: HttpAnswer, *, task_status: trio.TaskStatus[_Begun]) -> None:
        stream = answer.stream
        if stream is None:
            task_status.started((_complete(answer), None))
            return
        send, receive = trio.open_memory_channel[bytes | None](_MAX_CHUNKS)
        try:
            with send:
                task_status.started((HttpHead(answer.status, answer.headers, b""), receive))
                if answer.status not in STATUSES_WITHOUT_BODY:
                    await _pass_on(stream, send)
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()
            for callback in answer.after:
                callback()


async def _pass_on(stream: ByteStream, send: trio.MemorySendChannel[bytes | None]) -> None:
    """Send the chunks of a stream; errors mark the body as incomplete."""
    with suppress(trio.BrokenResourceError):
        try:
            async for piece in stream:
                try:
                    await send.send(piece)
                except trio.BrokenResourceError:
                    return  # Client disconnected.
        except Exception as error:
            if not isinstance(error, trio.BrokenResourceError):
                log.exception("response aborted")
            await send.send(None)


def _leave() -> None:
    release_current_ticket()
    release_caller()


def _with_chunks(begun: _Begun) -> HttpHead:
    # Separate object: the task's own references would keep it from being garbage collected.
    head, channel = begun
    return head if channel is None else head._replace(pieces=BodyChunks(channel))


def _is_per_process(path: str) -> bool:
    return path in _PROCESS_PATHS or path.endswith(_STATS)


def _complete(answer: HttpAnswer) -> HttpHead:
    for callback in answer.after:
        callback()
    if answer.stream is not None:
        answer = replace(answer, body=b"")
    return HttpHead(answer.status, answer.headers, answer.content)
