"""HTTP where Ray's proxy has the wire: requests come as values, and go as a status, headers and a body or pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ovmstrio.core.callers import Need, leave_caller
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.http import Headers, HttpAnswer, HttpRequest
from ovmstrio.core.limits import leave_place
from ovmstrio.wire.http.answers import size_refusal

if TYPE_CHECKING:
    from ovmstrio.wire.http.router import Route, Router

__all__ = ["HttpDoor", "HttpHead"]

_OF_ONE_PROCESS: Final = (
    "it is about one process of a cluster, and Ray answers for all: `serve status` tells what runs, Ray's own metrics "
    "count its requests, and `ovms deploy ray` changes what is served"
)
_OTHERS: Final = frozenset({"/metrics", "/v2/models/stats"})
_STATS: Final = "/stats"
_PIECES: Final = 16
"""How many pieces of a body may wait for whoever sends them."""


class HttpHead(NamedTuple):
    """An answer: its body, or where the pieces of its body come from."""

    status: int
    headers: Headers
    body: bytes
    pieces: trio.MemoryReceiveChannel[bytes] | None = None


class HttpDoor:
    """Answers requests by the server's one table of paths, on the trio side.

    Args:
        router: that table.
        tasks: owns streams; outlives them.
        max_body_bytes: larger bodies are refused.
    """

    def __init__(self, router: Router, tasks: trio.Nursery, max_body_bytes: int) -> None:
        self._router = router
        self._tasks = tasks
        self._max_body_bytes = max_body_bytes

    async def answer(self, request: HttpRequest) -> HttpHead:
        """Answer a request, whose ``target`` says what is asked for; a stream goes on until its pieces are closed.

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
        head: HttpHead = await self._tasks.start(self._answer_as_task, route, request)
        return head

    def _refusal(self, route: Route, request: HttpRequest) -> Exception | None:
        if not route.mount and (route.need in {Need.ADMIN, Need.METRICS} or _is_of_one(route.path)):
            return NotSupported(f"{request.method} {route.path}: {_OF_ONE_PROCESS}")
        size = len(request.body)
        return size_refusal(size, self._max_body_bytes) if size > self._max_body_bytes else None

    async def _answer(self, route: Route, request: HttpRequest) -> HttpHead:
        """Answer a request whose answer is whole; one that turns out to be a stream is sent by a task of its own."""
        answer = await self._admitted(route, request)
        if answer.stream is None:
            return _whole(answer)
        head: HttpHead = await self._tasks.start(self._send_as_task, answer)
        return head

    async def _answer_as_task(
        self, route: Route, request: HttpRequest, *, task_status: trio.TaskStatus[HttpHead]
    ) -> None:
        async with trio.open_nursery() as tasks:
            request = request._replace(tasks=tasks if route.has_tasks else None)
            await self._send_as_task(await self._admitted(route, request), task_status=task_status)
            tasks.cancel_scope.cancel()

    async def _admitted(self, route: Route, request: HttpRequest) -> HttpAnswer:
        try:
            return await self._router.admit(route, request) or await self._router.answer(route, request)
        finally:
            leave_place()
            leave_caller()

    async def _send_as_task(self, answer: HttpAnswer, *, task_status: trio.TaskStatus[HttpHead]) -> None:
        stream = answer.stream
        if stream is None:
            task_status.started(_whole(answer))
            return
        send, receive = trio.open_memory_channel[bytes](_PIECES)
        try:
            with send:
                task_status.started(HttpHead(answer.status, answer.headers, b"", receive))
                async for piece in stream:
                    await send.send(piece)
        except trio.BrokenResourceError:
            pass  # Nobody wants the rest.
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()
            for callback in answer.after:
                callback()


def _is_of_one(path: str) -> bool:
    return path in _OTHERS or path.endswith(_STATS)


def _whole(answer: HttpAnswer) -> HttpHead:
    for callback in answer.after:
        callback()
    if answer.stream is not None:
        answer = replace(answer, body=b"")
    return HttpHead(answer.status, answer.headers, answer.content)
