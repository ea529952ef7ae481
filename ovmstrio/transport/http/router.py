"""Routing table of REST requests, used by the fast path and the Quart application.

::

    method, path ─> rules of the server ─┐
                 ├> mounted services ────┼─> Route ─> response
                 └> service at the root ─┘

Paths whose first segment is one of the server's belong to the server. Other paths belong to the service mounted under
the first segment, or else to the service mounted at the root.

An encoded slash belongs to a name (``/v2/models/org%2Fmodel``). Clients that leave it as it is
(``/v2/models/org/model``) reach a served name if no other path matches. Doubled slashes count as one, except in paths
that proxies restrict.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

import structlog

from ovmstrio.core.callers import Permission, release_caller
from ovmstrio.core.errors import MissingScope, ServerError, Unauthenticated
from ovmstrio.core.events import WireRequest, current_request
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.limits import AdmissionTicket, current_ticket
from ovmstrio.transport.http.responses import error_response, with_auth_challenge

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ovmstrio.auth.gate import Gate
    from ovmstrio.core.events import RequestObserver
    from ovmstrio.core.http_messages import Headers, HttpRequest
    from ovmstrio.transport.http.responses import Cors

# -- Request observation -----------------------------------------------------------------------------------------------


class RequestEvents:
    """Adapter that reports requests to an observer as :class:`WireRequest`."""

    def __init__(self, observer: RequestObserver) -> None:
        self._observer = observer
        self._body_bytes = observer.body_bytes

    def begin(self, request: HttpRequest) -> WireRequest:
        """Create the record of a request and make it the task's current request."""
        record = WireRequest("HTTP", request.method, request.target or request.path, request.headers, request.peer)
        body = request.body if request.view is None else request.view
        record.received = len(body)
        if self._body_bytes:
            record.body = bytes(body[: self._body_bytes])
        current_request.set(record)
        return record

    def answered(self, record: WireRequest, answer: HttpAnswer) -> HttpAnswer:
        """Report an answered request; a streamed response is reported at its end."""
        current_request.set(None)
        record.status = answer.status
        if answer.stream is None:
            record.sent = answer.size
            self._notify(record)
            return answer
        return answer.followed_by(lambda: self._end_stream(record))

    def refused(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Report a request that was refused before its body was read."""
        self.answered(self.begin(request), answer)

    def left(self, record: WireRequest) -> None:
        """Report a request that was cancelled or whose client disconnected before the response."""
        current_request.set(None)
        self._notify(record)

    def _end_stream(self, record: WireRequest) -> None:
        if record.event is not None:
            record.sent = record.event.sent
        self._notify(record)

    def _notify(self, record: WireRequest) -> None:
        self._observer.request_ended(record)
        # The call references its record; the cycle would live until garbage collection.
        record.event = None


# -- Router ------------------------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)

_ABSOLUTE: Final = re.compile(r"https?://[^/?#]+", re.IGNORECASE)
"""Scheme and authority of a request target in absolute form."""
_KEPT_ESCAPES: Final = re.compile("%(2f|25)", re.IGNORECASE)
"""Escapes of slashes and percent signs, which stay encoded until a name has been separated from its path."""
_SLASHES: Final = re.compile("//+")
_RESTRICTED: Final = frozenset({Permission.ADMIN, Permission.METRICS, Permission.READ})
"""Needs of paths that must be written exactly, so that access rules of proxies apply."""
_PREFLIGHT: Final = "access-control-request-method"
"""Header of a browser's request for permission to call another origin."""
_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
_PLACE: Final = re.compile(r"<(number:|path:)?(\w+)>")
_VERB: Final = re.compile(r":\w+$")
_PATTERNS: Final = {None: "[^/]+?", "number:": "[0-9]+", "path:": "(?s:.+)"}
_MODEL: Final = "(?P<model>[^/]+?)"
_MODEL_WITH_SLASHES: Final = "(?P<model>(?s:.+?))"
_MAX_CACHED_ROUTES: Final = 1024
"""Maximum number of cached routes; clients repeat a few paths."""

View = Callable[..., Awaitable[HttpAnswer]]
BodyView = Callable[[Any], Awaitable[HttpAnswer]]
"""Answers requests with a given head from their bodies (bytes, or a memoryview for large ones)."""

Admit = Callable[..., Awaitable[AdmissionTicket | None]]
"""Admits a request of a method before its body is read."""

Answering = Callable[["Route", "HttpRequest"], Coroutine[Any, Any, HttpAnswer]]


class Route(NamedTuple):
    """Handler of a request and its properties.

    Attributes:
        view: the handler.
        refuse: creates the error response in the format of the path's API.
        path: path below the mount, decoded except for encoded slashes (``%2F``), without doubled slashes if it is the
            server's.
        mount: name of the mounted service; empty at the root.
        places: path parameters by name, for the log.
        is_hot: served by the fast path.
        has_tasks: the handler starts tasks that end with the response.
        takes_views: a large body may be passed as the request's ``view``.
        admit: admission before the body is read; None if not needed.
        need: scope that the caller needs.
        service: name of the requested service; empty if only the body tells.
        of_bodies: returns a handler that needs the body only, for requests with given headers; None if unsupported.
        template: path template, such as ``/v2/models/{model}``; empty for services that route their own paths.
    """

    view: Callable[[HttpRequest], Awaitable[HttpAnswer]]
    refuse: Callable[[Exception], HttpAnswer]
    path: str
    mount: str = ""
    places: Mapping[str, str] = {}
    is_hot: bool = False
    has_tasks: bool = False
    takes_views: bool = False
    admit: Admit | None = None
    need: Permission = Permission.ADMIN
    service: str = ""
    of_bodies: Callable[[Headers], BodyView | None] | None = None
    template: str = ""


class Rule(NamedTuple):
    """One path of the server; handlers of ``route`` also get the path parameters by name.

    Attributes:
        start: literal start of the path.
        pattern: regular expression of the path, compiled when a path has this start.
        has_verb: the path ends with a verb, so that it is no name of another rule.
        first: first path segment, which no service can have; empty if a service of that name takes precedence.
    """

    start: str
    pattern: str
    has_verb: bool
    first: str
    methods: frozenset[str]
    route: Route

    def match(self, path: str) -> re.Match[str] | None:
        """Match a path; return None if it is another one."""
        return _compiled(self.pattern).fullmatch(path) if path.startswith(self.start) else None

    def match_loosely(self, path: str) -> re.Match[str] | None:
        """Match a path with a model whose name has slashes that are not encoded; None for paths without a model."""
        if _MODEL not in self.pattern or not path.startswith(self.start):
            return None
        return _compiled(self.pattern.replace(_MODEL, _MODEL_WITH_SLASHES)).fullmatch(path)


_compiled: Final = cache(re.compile)
"""Compiled patterns: all together would take 10 ms of each start."""


class MissingRouteResponses(Protocol):
    """Responses to requests without a route."""

    def no_path(self, method: str, path: str) -> HttpAnswer:
        """Return the response to an unknown path."""
        ...

    def no_method(self, method: str, path: str, allowed: Collection[str] = ()) -> HttpAnswer:
        """Return the response to an unknown method, or one other than the ``allowed`` methods of the path."""
        ...


def rule(
    template: str,
    method: str,
    view: View,
    *,
    need: Permission,
    is_hot: bool = False,
    has_tasks: bool = False,
    takes_views: bool = False,
    admit: Admit | None = None,
    refuse: Callable[[Exception], HttpAnswer] = error_response,
    body_view_factory: Callable[..., BodyView | None] | None = None,
) -> Rule:
    """Create a rule from a path template such as ``/v2/models/<model>``.

    ``<number:name>`` matches digits and ``<path:name>`` the rest of the path. A template may end with a verb
    (``:word``). A trailing slash is optional, except after a verb. The other arguments are as in :class:`Route`.
    """
    parts = _PLACE.split(template)
    pattern = "".join(
        re.escape(literal) + (f"(?P<{name}>{_PATTERNS[kind]})" if name else "")
        for literal, kind, name in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], ""], strict=True)
    )
    methods = frozenset({method, "HEAD"} if method == "GET" else {method})
    has_verb = _VERB.search(template) is not None
    pattern += "" if has_verb else "/?"
    shown = _PLACE.sub(r"{\2}", template)
    route = Route(view, refuse, "", "", {}, is_hot, has_tasks, takes_views, admit, need, "", body_view_factory, shown)
    return Rule(parts[0], pattern, has_verb, template.split("/")[1], methods, route)


class Router:
    """Router of HTTP requests.

    Args:
        rules: the server's paths.
        refusals: responses to requests without a route.
        find_mounted: returns the route of a service with its own paths for a method and path, or None; call
            :meth:`forget` when the services change.
        has_service: returns whether a name is served; call :meth:`forget` when the names change.
        cors: CORS settings; None to disable CORS.
        has_limits: returns whether routes with ``admit`` need admission.
        gate: authenticates callers; None for open access.
        count_rejected: counts a request whose body was not accepted, by error and name of the requested service.
        observer: notified of every request; None for none.

    Attributes:
        answer: coroutine function that returns the response of a route; every exception becomes a response. The caller
            must close a response stream.
        heads: cache of the fast path, by head bytes.
        revocable_streams: open streams of authenticated callers; None without a gate.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        refusals: MissingRouteResponses,
        find_mounted: Callable[[str, str], Route | None] = lambda _method, _path: None,
        cors: Cors | None = None,
        *,
        has_service: Callable[[str], bool] = lambda _name: False,
        has_limits: Callable[[], bool] = bool,
        gate: Gate | None = None,
        count_rejected: Callable[[ServerError, str], object] = lambda _error, _service: None,
        observer: RequestObserver | None = None,
    ) -> None:
        self.count_rejected = count_rejected
        self._events = None if observer is None else RequestEvents(observer)
        # Without an observer no wrapper runs between caller and handler.
        self.answer: Answering = self._answer if self._events is None else partial(self._answer_observed, self._events)
        self.rules = rules
        self._own_segments = frozenset(each.first for each in rules)
        self._refusals = refusals
        self._find_mounted = find_mounted
        self._cors = cors
        self._has_service = has_service
        self._has_refused_preflight = False
        self._has_limits = has_limits
        self._gate = gate
        self.revocable_streams = None if gate is None else gate.revocable_streams
        self._routes: dict[tuple[str, str], Route | HttpAnswer] = {}
        self.heads: dict[bytes, Any] = {}

    def forget(self) -> None:
        """Clear the route caches."""
        self._routes.clear()
        self.heads.clear()

    def find(self, method: str, target: str) -> Route | HttpAnswer:
        """Return the route of a target without query, or the refusal of all requests for it."""
        found = self._routes.get((method, target))
        if found is None:
            found = self._resolve(method, target)
            if len(self._routes) >= _MAX_CACHED_ROUTES:
                self._routes.clear()
            self._routes[method, target] = found
        return found

    async def admit(self, route: Route, request: HttpRequest) -> HttpAnswer | None:
        """Authenticate and admit a request before its body is read; return the refusal, or None.

        Sets ``current_caller`` and ``current_ticket``, which the caller must release after the response.
        """
        try:
            if self._gate is not None:
                await self._gate.let_in(route.need, route.service, request.headers, request.peer.certificate)
            if route.admit is not None and self._has_limits():
                current_ticket.set(await route.admit(request.method))
        except ServerError as error:
            is_denied = route.need is Permission.ADMIN and isinstance(error, Unauthenticated | MissingScope)
            if is_denied and self._gate is not None:
                request_line = f"{request.method} {request.path}"
                change = _path_pattern(route, request)
                self._gate.denials.log_denied(change, error, client=request.client, about=request_line)
            refusal = self.shared(with_auth_challenge(route.refuse(error), error), request.headers)
            if self._events is not None:
                self._events.refused(request, refusal)
            return refusal
        return None

    def needs_admission(self, route: Route) -> bool:
        """Return whether requests of a route need :meth:`admit`."""
        return self._gate is not None or (route.admit is not None and self._has_limits())

    def try_admit(self, route: Route, headers: tuple[tuple[str, str], ...]) -> bool:
        """Admit a request without blocking and set ``current_caller``; False if :meth:`admit` is needed instead."""
        if self._gate is None or (route.admit is not None and self._has_limits()):
            return False
        return self._gate.try_authenticate(route.need, route.service, headers)

    async def refuse(self, refusal: HttpAnswer, request: HttpRequest) -> HttpAnswer:
        """Refuse a request without a route; with a gate for all requests, unknown callers get 401 instead of 404."""
        is_guarded = self._gate is not None and self._gate.guards_everything and request.method != "OPTIONS"
        if request.method == "OPTIONS" and self._cors is None and not self._has_refused_preflight:
            self._has_refused_preflight = any(name == _PREFLIGHT for name, _ in request.headers)
            if self._has_refused_preflight:
                hint = "set --allowed-origins to the origins of your pages, or to *"
                log.warning("cross-origin requests refused", origin=_origin(request.headers), hint=hint)
        unknown = Route(_unanswered, error_response, "", need=Permission.CALLER)
        admission_refusal = await self.admit(unknown, request) if is_guarded else None
        try:
            if admission_refusal is not None:
                return admission_refusal
            answer = self.shared(refusal, request.headers)
            if self._events is not None:
                self._events.refused(request, answer)
            return answer
        finally:
            release_caller()

    async def _answer_observed(self, observer: RequestEvents, route: Route, request: HttpRequest) -> HttpAnswer:
        record = observer.begin(request)
        record.route = route.template
        try:
            answer = await self._answer(route, request)
        except BaseException:
            observer.left(record)
            raise
        return observer.answered(record, answer)

    async def _answer(self, route: Route, request: HttpRequest) -> HttpAnswer:
        try:
            answer = await route.view(request)
        except Exception as error:  # noqa: BLE001 - an error of one request must not affect others
            return self.failed(route, request.headers, error)
        return answer if self._cors is None else self.shared(answer, request.headers)

    def failed(self, route: Route, headers: Headers, error: Exception) -> HttpAnswer:
        """Return the error response; unexpected exceptions are logged."""
        return self.shared(route.refuse(_reportable_error(error, route.path, route.places)), headers)

    def body_view(self, route: Route, headers: Headers) -> BodyView | None:
        """Return the handler that answers requests with these headers from their bodies alone; None if there is none.

        The handler raises errors for :meth:`failed`.
        """
        view = None if self._events is not None or route.of_bodies is None else route.of_bodies(headers)
        if view is not None and self._cors is not None:
            view = partial(self._share_view, view, headers)
        return view

    async def _share_view(self, view: BodyView, headers: Headers, body: Any) -> HttpAnswer:
        return self.shared(await view(body), headers)

    def shared(self, answer: HttpAnswer, request_headers: Headers) -> HttpAnswer:
        """Return the response to a request with CORS headers; server settings override headers of services."""
        if self._cors is None:
            return answer
        own = tuple(line for line in answer.headers if line[0] != "access-control-allow-origin")
        return replace(answer, headers=own).with_headers(self._cors.response_headers(request_headers))

    def _resolve(self, method: str, target: str) -> Route | HttpAnswer:
        raw = _raw_path(target)
        if raw is None:
            refuse = self._refusals.no_path if method in _METHODS else self._refusals.no_method
            return refuse(method, unquote(target))
        # Decoded, an encoded slash would separate segments and bypass path rules of proxies.
        kept = unquote(_KEPT_ESCAPES.sub(lambda escape: "%25" + escape[1].upper(), raw))
        path, merged = kept.replace("%25", "%"), _SLASHES.sub("/", kept)
        if merged.split("/", 2)[1] not in self._own_segments:
            found = self._find_mounted(method, path)
            if found is not None:
                return found
        if method not in _METHODS and not isinstance(self._match(method, merged), Route):
            return self._refusals.no_method(method, path)
        if ".." in re.split("[/:]|%2F", merged):
            return self._refusals.no_path(method, path)
        if method == "OPTIONS" and self._cors is not None:
            return HttpAnswer(200)
        route = self._match(method, merged) or self._match_loosely(method, merged)
        if route is None or (merged != kept and isinstance(route, Route) and route.need in _RESTRICTED):
            return self._refusals.no_path(method, path)
        return route

    def _match(self, method: str, kept: str) -> Route | HttpAnswer | None:
        """Return the route of a path, in which slashes and percent signs of names are encoded; None if unknown."""
        allowed: set[str] = set()
        for each in self.rules:
            match = each.match(kept)
            if match is None:
                continue
            if method in each.methods:
                return _bind(each.route, match, kept)
            allowed |= each.methods
            if each.has_verb:
                break
        path = kept.replace("%25", "%")
        return self._refusals.no_method(method, path, allowed - {"HEAD"}) if allowed else None

    def _match_loosely(self, method: str, kept: str) -> Route | None:
        """Return the route of a model whose name has slashes that are not encoded, for the shortest possible name.

        With a gate, the name of a model that is not served has a route too: whether it is served must not decide
        between 401 and 400.
        """
        rules = (each for each in self.rules if method in each.methods)
        found = [(match, each) for each in rules if (match := each.match_loosely(kept))]
        if not found:
            return None
        match, each = min(found, key=lambda pair: len(pair[0]["model"]))
        route = _bind(each.route, match, kept)
        if self._has_service(route.service):
            return route
        if self._gate is None:
            return None
        refusal = self._refusals.no_path(method, route.path)

        async def refuse(_: HttpRequest) -> HttpAnswer:
            return refusal

        return route._replace(view=refuse, admit=None, of_bodies=None)


def _bind(route: Route, match: re.Match[str], kept: str) -> Route:
    """Return a route with the path and the path parameters of a match."""
    route = route._replace(path=kept.replace("%25", "%"))
    places = {name: given.replace("%2F", "/").replace("%25", "%") for name, given in match.groupdict().items()}
    if not places:
        return route
    return route._replace(
        view=partial(route.view, **places),
        places=places,
        admit=partial(route.admit, **places) if route.admit is not None else None,
        service=places.get("model") or "",
        of_bodies=partial(route.of_bodies, **places) if route.of_bodies is not None else None,
    )


def _raw_path(target: str) -> str | None:
    """Return the encoded path of a request target without its query (RFC 9112, 3.2).

    Absolute form: the path after scheme and authority. None for other forms, and for targets with a fragment.
    """
    if "#" in target:
        return None
    if target.startswith("/"):
        return target
    absolute = _ABSOLUTE.match(target)
    return None if absolute is None else target[absolute.end() :] or "/"


async def _unanswered(_: HttpRequest) -> HttpAnswer:
    raise NotImplementedError


def _origin(headers: Headers) -> str:
    return next((value for name, value in headers if name == "origin"), "")


def _reportable_error(error: Exception, path: str, places: Mapping[str, Any]) -> Exception:
    """Return the exception to report to the client; unexpected ones are logged."""
    leaves = _leaves(error)
    # A path parameter may have the name ``path``.
    fields = {**places, "path": path}
    if len(leaves) > 1:
        log.error("request failed with several errors", exc_info=error, **fields)
        return next((leaf for leaf in leaves if isinstance(leaf, ServerError)), error)
    (leaf,) = leaves
    if not isinstance(leaf, ServerError):
        log.error("request failed", exc_info=leaf, **fields)
    return leaf


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def _path_pattern(route: Route, request: HttpRequest) -> str:
    """Return the request line with the path parameters replaced by their names, for a bounded number of log keys."""
    names = {given.replace("/", "%2F"): f"<{name}>" for name, given in route.places.items()}
    path = "/".join(names.get(segment, segment) for segment in request.path.split("/"))
    return f"{request.method} {path}"
