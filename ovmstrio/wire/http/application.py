"""The one Quart application of a front end, whose only route is the router, and what serves it on connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from ovmstrio.core.callers import current_caller
from ovmstrio.core.http import BODILESS, HttpAnswer, HttpRequest
from ovmstrio.core.limits import current_place
from ovmstrio.wire.http.answers import size_refusal, slowness_refusal
from ovmstrio.wire.http.hypercorn_connection import PEER, RECEIVE_UNTIL, ApplicationServer

if TYPE_CHECKING:
    from ovmstrio.wire.http.ending import Ending
    from ovmstrio.wire.http.router import Route, Router

__all__ = ["serve_application"]

_ANSWER: Final = "ovmstrio.answer"
_TASKS: Final = "ovmstrio.tasks"
_PLACE: Final = "ovmstrio.place"
_CALLER: Final = "ovmstrio.caller"


def serve_application(router: Router, ending: Ending, max_body_bytes: int, receive_seconds: float) -> ApplicationServer:
    """Make what serves the application of one front end; larger bodies are refused, and slower requests.

    Args:
        router: finds what answers requests.
        ending: how the front end ends.
        max_body_bytes: of what a request may have.
        receive_seconds: what a request may take from its first byte to its last.
    """
    app = _Application(__name__, static_folder=None)
    app.router = router
    app.receive_seconds = receive_seconds
    # What takes nothing of an answer is given up by the connection.
    app.config |= {"MAX_CONTENT_LENGTH": max_body_bytes, "RESPONSE_TIMEOUT": None}
    return ApplicationServer(app, ending, receive_seconds)


class _Application(QuartTrio):
    """Quart on trio, whose only route is the router."""

    router: Router
    receive_seconds: float

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, and end its answer."""
        # The framework has no use for it, and fails on one that begins with no slash.
        scope["path"] = "/"
        try:
            async with trio.open_nursery() as tasks:
                scope[_TASKS] = tasks
                await super().asgi_app(scope, receive, send)
                tasks.cancel_scope.cancel()
        finally:
            await _finish(scope)
            if (place := scope.pop(_PLACE, None)) is not None:
                place.release()
            if (caller := scope.pop(_CALLER, None)) is not None:
                caller.leave()

    def create_url_adapter(self, _request: Any) -> None:
        """Look for no route of the framework's: there are none, and it fails on names of hosts that cannot be."""

    async def dispatch_request(self, request_context: Any = None) -> Response:
        """Have the router answer the request."""
        del request_context
        scope: Any = request.scope
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        target, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        route = self.router.find(scope["method"], target)
        peer = scope["state"][PEER]
        asked = HttpRequest(scope["method"], "", query, headers, b"", peer, f"{target}?{query}" if query else target)
        if isinstance(route, HttpAnswer):
            return _respond(await self.router.refuse(route, asked))
        return _respond(await self._answer(route, asked._replace(path=route.path, mount=route.mount)))

    async def _answer(self, route: Route, asked: HttpRequest) -> HttpAnswer:
        state: Any = request.scope["state"]
        request.body_timeout = max(0, state[RECEIVE_UNTIL] - trio.current_time())
        refusal = await self.router.admit(route, asked)
        request.scope[_CALLER] = current_caller.get()  # type: ignore[typeddict-unknown-key]
        if refusal is not None:
            return refusal
        request.scope[_PLACE] = current_place.get()  # type: ignore[typeddict-unknown-key]
        try:
            body: Any = await request.get_data()
        except HTTPException as error:
            return self.router.shared(route.refuse(self._refusal(error)), asked.header("origin") or "")
        tasks: Any = request.scope[_TASKS] if route.has_tasks else None  # type: ignore[typeddict-item]
        return await self.router.answer(route, asked._replace(body=body, tasks=tasks))

    def _refusal(self, error: HTTPException) -> Exception:
        if isinstance(error, RequestEntityTooLarge):
            limit = self.config["MAX_CONTENT_LENGTH"]
            return size_refusal(request.content_length or f"more than {limit}", limit)
        return slowness_refusal(self.receive_seconds)


def _respond(answer: HttpAnswer) -> Response:
    """Make the framework's response of an answer, which is ended with the request."""
    request.scope[_ANSWER] = answer  # type: ignore[typeddict-unknown-key]
    body: Any = answer.content if answer.stream is None else answer.stream
    response = Response(b"" if answer.status in BODILESS else body, answer.status)
    response.headers.clear()
    for name, value in answer.headers:
        response.headers.add(name, value)
    if isinstance(body, bytes) and answer.status not in BODILESS:
        response.headers["content-length"] = str(len(body))
    return response


async def _finish(scope: Any) -> None:
    """End the answer of a request, which has been sent or cannot be: its stream is closed, its callbacks begin.

    Cancellation: shielded, as streams close in a bounded time.
    """
    answer: HttpAnswer | None = scope.pop(_ANSWER, None)
    if answer is None:
        return
    if answer.stream is not None:
        with trio.CancelScope(shield=True):
            await answer.stream.aclose()
    for callback in answer.after:
        callback()
