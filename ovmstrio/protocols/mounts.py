"""Routing to services with their own HTTP paths: below the service's name, and one service at the root.

::

    /{name}/...  ─> the service of that name ─(has no such path)─> the service at the root
    /...         ─> the service at the root
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from ovmstrio.auth.authentication import strip_credentials
from ovmstrio.auth.revocable_streams import register_stream
from ovmstrio.core.callers import Permission
from ovmstrio.core.events import ApiInterface
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.http.responses import error_response
from ovmstrio.transport.http.router import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.core.limits import AdmissionTicket
    from ovmstrio.core.service import HttpRoutes
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane


class MountKind(Protocol):
    """HTTP interface of one kind of service; ``api_interface`` labels its calls."""

    api_interface: ApiInterface

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Return the routes of a service."""
        ...

    def refuse(self, error: Exception) -> HttpAnswer:
        """Convert an error to a response of this kind."""
        ...

    def is_call(self, method: str, path: str) -> bool:
        """Return whether a request is a call, and not introspection."""
        ...

    def need(self, method: str, path: str) -> Permission:
        """Return the scope that a request requires."""
        ...


class SelfRoutedMount:
    """Kind whose services route their own paths, with errors in the server's form."""

    api_interface = ApiInterface("HTTP", "REST")

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Return the service."""
        del name, is_root
        routes: HttpRoutes = service
        return routes

    def refuse(self, error: Exception) -> HttpAnswer:
        """Convert an error as the server's own routes do."""
        return error_response(error)

    def is_call(self, method: str, path: str) -> bool:
        """Return True: every request is a call."""
        del method, path
        return True

    def need(self, method: str, path: str) -> Permission:
        """Return the scope of calls."""
        del method, path
        return Permission.INFER


class ServiceMounts:
    """Dynamic routes of services with HTTP paths; ``kinds`` has factories by kind name, called on first use."""

    def __init__(self, plane: DataPlane, kinds: Mapping[str, Callable[[], MountKind]], root: str = "") -> None:
        self._plane = plane
        self._kinds = {name: cache(create) for name, create in kinds.items()}
        self._root = root
        self._kind_of: dict[str, MountKind] = {}
        self._routes: dict[tuple[str, bool], tuple[Any, HttpRoutes]] = {}
        self._refusals = OvmsRouteErrors()
        plane.registry.subscribe(lambda _: self._refresh())
        self._refresh()

    def _refresh(self) -> None:
        names = {kind: self._plane.registry.names_of(kind) for kind in self._kinds}
        self._kind_of = {name: self._kinds[kind]() for kind, found in names.items() for name in found}
        self._routes = {key: known for key, known in self._routes.items() if key[0] in self._kind_of}

    def find(self, method: str, path: str) -> Route | None:
        """Return the route of a path; None if no service has it."""
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

    async def _admit(self, name: str, path: str, method: str) -> AdmissionTicket | None:
        kind = self._kind_of.get(name)
        if kind is None or not self._plane.has_limits() or not kind.is_call(method, path):
            return None
        return await self._plane.admit(name, "", kind.api_interface, method)

    async def _answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        api_interface = self._kind_of[name].api_interface
        sent_id, size = request.header("x-request-id") or "", len(request.body)
        is_call = self._kind_of[name].is_call(request.method, request.path)
        started = self._plane.call(
            name, api_interface, request.method, request_id=sent_id, received=size, is_unlimited=not is_call
        )
        with await started as call:
            routes = self._routes_of(name, call.service, is_root=not request.mount)
            headers = strip_credentials(request.headers)
            passed = request if headers is request.headers else request._replace(headers=headers)
            answer = await routes.answer_http(passed)
            if answer is not None:
                return _observed(answer, call, request)
        return await self._answer_at_root(request)

    async def _answer_at_root(self, request: HttpRequest) -> HttpAnswer:
        """Answer a path that the service does not have: the service at the root may have it."""
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
    """Record the outcome of a call; a streamed response keeps the call open until the stream ends."""
    if answer.status >= HTTPStatus.BAD_REQUEST:
        call.event.code = call.event.code or str(answer.status)
    stream = answer.stream
    if stream is None:
        call.event.sent = answer.size
        return answer
    from ovmstrio.handlers.routes import LeasedStream  # noqa: PLC0415 - only streamed responses need it

    known = register_stream(request.peer, request.headers)
    return replace(answer, body=LeasedStream(stream, call.hand_over(), known=known))
