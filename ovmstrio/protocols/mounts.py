"""Services that have HTTP paths of their own, below their names and, if it is so wished, one at the root of the port.

::

    /{name}/...  ─> the service of that name ─(has no such path)─> the service at the root
    /...         ─> the service at the root
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from ovmstrio.auth.credential_headers import without_proof
from ovmstrio.auth.revocable_streams import begin_long
from ovmstrio.core.callers import Need, current_certificate
from ovmstrio.core.events import Door
from ovmstrio.serving.ovms_errors import OvmsRefusals
from ovmstrio.transport.http.responses import error_answer
from ovmstrio.transport.http.router import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.limits import CallPlace
    from ovmstrio.core.service import HttpRoutes
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane

__all__ = ["MountKind", "ServiceItself", "ServiceMounts"]


class MountKind(Protocol):
    """How services of one kind are called over HTTP; ``door`` is what their calls are observed as."""

    door: Door

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Give the paths of a service."""
        ...

    def refuse(self, error: Exception) -> HttpAnswer:
        """Answer for an error, in the form of this kind."""
        ...

    def is_call(self, method: str, path: str) -> bool:
        """Tell whether a request has the service do something, rather than tell of itself."""
        ...

    def need(self, method: str, path: str) -> Need:
        """Tell what a request needs of its caller, where callers have to be known."""
        ...


class ServiceItself:
    """A kind whose services know their paths themselves, and whose errors have the server's form."""

    door = Door("HTTP", "REST")

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Give the service."""
        del name, is_root
        routes: HttpRoutes = service
        return routes

    def refuse(self, error: Exception) -> HttpAnswer:
        """Answer as the server's own paths do."""
        return error_answer(error)

    def is_call(self, method: str, path: str) -> bool:
        """Take every request for a call."""
        del method, path
        return True

    def need(self, method: str, path: str) -> Need:
        """Have every request need what a call needs."""
        del method, path
        return Need.INFER


class ServiceMounts:
    """The services of a server that have HTTP paths; they come and go while it serves.

    Args:
        plane: has them.
        kinds: by the names of kinds whose services are called over HTTP, what tells how; asked once there is one.
        root: the name of the service at the root of the port; empty for none.
    """

    def __init__(self, plane: DataPlane, kinds: Mapping[str, Callable[[], MountKind]], root: str = "") -> None:
        self._plane = plane
        self._kinds = {name: cache(tell) for name, tell in kinds.items()}
        self._root = root
        self._kind_of: dict[str, MountKind] = {}
        self._routes: dict[tuple[str, bool], tuple[Any, HttpRoutes]] = {}
        self._refusals = OvmsRefusals()
        plane.registry.subscribe(lambda _: self._look())
        self._look()

    def _look(self) -> None:
        names = {kind: self._plane.registry.names_of(kind) for kind in self._kinds}
        self._kind_of = {name: self._kinds[kind]() for kind, found in names.items() for name in found}
        self._routes = {key: known for key, known in self._routes.items() if key[0] in self._kind_of}

    def find(self, method: str, path: str) -> Route | None:
        """Find the service of a path, and what the method needs of its caller; None if it is none's."""
        _, name, *rest = path.split("/", 2)
        if name in self._kind_of:
            return self._route(method, name, f"/{rest[0]}" if rest else "", name)
        return self._route_at_root(method, path)

    def _route_at_root(self, method: str, path: str) -> Route | None:
        return self._route(method, self._root, path) if self._root in self._kind_of else None

    def _route(self, method: str, name: str, path: str, mount: str = "") -> Route:
        kind, admit = self._kind_of[name], partial(self._admit, name, path)
        answer, need = partial(self._answer, name), kind.need(method, path)
        return Route(answer, kind.refuse, path, mount, is_hot=True, admit=admit, need=need, service=name)

    async def _admit(self, name: str, path: str, method: str) -> CallPlace | None:
        kind = self._kind_of.get(name)
        if kind is None or not self._plane.has_limits() or not kind.is_call(method, path):
            return None
        return await self._plane.admit(name, "", kind.door, method)

    async def _answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        door = self._kind_of[name].door
        sent_id, size = request.header("x-request-id") or "", len(request.body)
        is_call = self._kind_of[name].is_call(request.method, request.path)
        asked = self._plane.call(name, door, request.method, request_id=sent_id, received=size, is_free=not is_call)
        with await asked as call:
            routes = self._routes_of(name, call.service, is_root=not request.mount)
            shown = without_proof(request.headers)
            asked_of = request if shown is request.headers else request._replace(headers=shown)
            answer = await routes.answer_http(asked_of)
            if answer is not None:
                return _observed(answer, call, request)
        return await self._answer_elsewhere(request)

    async def _answer_elsewhere(self, request: HttpRequest) -> HttpAnswer:
        """Answer for a path that a service does not have; if it is below a name, the root may have it."""
        path = f"/{request.mount}{request.path}" if request.mount else request.path
        route = self._route_at_root(request.method, path) if request.mount else None
        if route is None:
            return self._refusals.no_path(request.method, path)
        return await route.view(request._replace(path=path, mount=""))

    def _routes_of(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        known = self._routes.get((name, is_root))
        if known is not None and known[0] is service:
            return known[1]
        routes = self._kind_of[name].routes(name, service, is_root=is_root)
        self._routes[name, is_root] = service, routes
        return routes


def _observed(answer: HttpAnswer, call: ObservedCall, request: HttpRequest) -> HttpAnswer:
    """Note what came of a call; one that is answered with a stream lasts as long as that."""
    if answer.status >= HTTPStatus.BAD_REQUEST:
        call.event.code = call.event.code or str(answer.status)
    stream = answer.stream
    if stream is None:
        call.event.sent = answer.size
        return answer
    # Services whose answers have an end from the beginning do without.
    from ovmstrio.handlers.routes import HeldStream  # noqa: PLC0415 - for streams alone

    known = begin_long(request.headers, current_certificate.get())
    return replace(answer, body=HeldStream(stream, call.hand_over(), known=known))
