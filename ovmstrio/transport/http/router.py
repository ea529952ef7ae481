"""Which request is answered by what: the one table that the fast lane and the application ask.

::

    method, path ─> the server's own rules ─┐
                 ├> names of services ──────┼─> Route ─> answer
                 └> the service at the root ┘

The first segments of the server's own paths are the server's.  Of all others a service that is mounted under its name
is asked first, and then the one at the root, whose paths they all are.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

import structlog

from ovmstrio.core.callers import Need, current_certificate, leave_caller
from ovmstrio.core.errors import MissingScope, ServerError, Unauthenticated
from ovmstrio.core.events import WireRequest, current_request, is_over_tls, kept_body_bytes
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.limits import CallPlace, current_place
from ovmstrio.telemetry.denied_admin_log import tell_refused
from ovmstrio.transport.http.responses import challenge, error_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.auth.gate import Gate
    from ovmstrio.core.events import RequestObserver
    from ovmstrio.core.http import Headers, HttpRequest
    from ovmstrio.transport.http.fast_path import Head
    from ovmstrio.transport.http.responses import Cors

__all__ = ["BodyView", "Mounts", "Refusals", "Route", "RoutedRequest", "Router", "Rule", "ToldRequests", "rule"]

# ----------------------------------------------------------------------
# Requests over HTTP, told to whoever wants to know of each: begun, answered, refused, or left by their clients
# ----------------------------------------------------------------------


class ToldRequests:
    """Makes a :class:`WireRequest` of each request, and tells of its end.

    Args:
        observer: is told.
    """

    def __init__(self, observer: RequestObserver) -> None:
        self._observer = observer

    def begin(self, request: HttpRequest) -> WireRequest:
        """Make a request the one that the running task answers."""
        told = WireRequest("HTTP", request.method, request.target or request.path, request.headers, request.peer)
        body = request.body if request.view is None else request.view
        told.received = len(body)
        if most := kept_body_bytes.get():
            told.body = bytes(body[:most])
        told.is_encrypted = is_over_tls.get()
        current_request.set(told)
        return told

    def answered(self, told: WireRequest, answer: HttpAnswer) -> HttpAnswer:
        """Tell of a request that has its answer; one that is a stream lasts as long as that."""
        current_request.set(None)
        told.status = answer.status
        if answer.stream is None:
            told.sent = answer.size
            self._tell(told)
            return answer
        return answer.followed_by(lambda: self._end_stream(told))

    def refused(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Tell of a request that is answered before its body was read."""
        self.answered(self.begin(request), answer)

    def left(self, told: WireRequest) -> None:
        """Tell of a request whose client left before there was an answer, or that was cut off."""
        current_request.set(None)
        self._tell(told)

    def _end_stream(self, told: WireRequest) -> None:
        if told.event is not None:
            told.sent = told.event.sent
        self._tell(told)

    def _tell(self, told: WireRequest) -> None:
        self._observer.request_ended(told)
        # Its call knows it: both would be kept until cycles are looked for.
        told.event = None


# ----------------------------------------------------------------------
# Which request is answered by what: the one table that the fast lane and the application ask
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_ABSOLUTE: Final = re.compile(r"https?://[^/?#]+", re.IGNORECASE)
"""The scheme and authority of a target in absolute form."""
_ENCODED_SLASH: Final = re.compile("%2f", re.IGNORECASE)
_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
_PLACE: Final = re.compile(r"<(number:|path:)?(\w+)>")
_VERB: Final = re.compile(r":\w+$")
_PATTERNS: Final = {None: "[^/]+?", "number:": "[0-9]{1,19}", "path:": ".+"}
_KNOWN: Final = 1024
"""How many requests' routes are remembered; clients ask for the same few again and again."""

View = Callable[..., Awaitable[HttpAnswer]]
BodyView = Callable[[Any], Awaitable[HttpAnswer]]
"""Answers requests that have the same head by their bodies, which are bytes or, where large, views of such."""

Admit = Callable[..., Awaitable[CallPlace | None]]
"""Takes a place for a request of a method, before its body is read."""

Answering = Callable[["Route", "HttpRequest"], Coroutine[Any, Any, HttpAnswer]]


class Rule(NamedTuple):
    """One path of the server's own; ``view`` gets the request, and the places of the path by name."""

    pattern: re.Pattern[str]
    first: str
    methods: frozenset[str]
    view: View
    is_hot: bool
    has_tasks: bool
    takes_views: bool
    admit: Admit | None
    refuse: Callable[[Exception], HttpAnswer]
    need: Need
    of_bodies: Callable[..., BodyView | None] | None = None


class Route(NamedTuple):
    """What answers a request.

    Attributes:
        view: answers it.
        refuse: answers for an error, in the form of whose path it is.
        path: below the mount, decoded but for encoded slashes, which are ``%2F``.
        mount: a service's name; empty for the root.
        places: what stands in the path where its rule has names, for the log.
        is_hot: whether the fast lane answers it.
        has_tasks: whether its view starts tasks that end with the answer.
        takes_views: whether a large body may come as the request's ``view``.
        admit: takes a place for a request, before its body is read; None where there is no need.
        need: what a request needs of its caller.
        service: which one a request is about; empty where only its body tells.
        of_bodies: makes of headers what answers requests that have them by their bodies alone; None, as by itself,
            where more of a request is asked for.
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
    need: Need = Need.ADMIN
    service: str = ""
    of_bodies: Callable[[Headers], BodyView | None] | None = None


class Mounts(Protocol):
    """Services that have HTTP paths of their own."""

    def find(self, method: str, path: str) -> Route | None:
        """Find the service of a path, and what the method needs of its caller; None if it is none's."""
        ...


class Refusals(Protocol):
    """How requests are refused that nothing answers."""

    def no_path(self, method: str, path: str) -> HttpAnswer:
        """Answer for a path that there is not."""
        ...

    def no_method(self, method: str, path: str) -> HttpAnswer:
        """Answer for a method that there is not, or not for this path."""
        ...


def rule(
    template: str,
    method: str,
    view: View,
    *,
    is_hot: bool = False,
    has_tasks: bool = False,
    takes_views: bool = False,
    admit: Admit | None = None,
    need: Need = Need.ADMIN,
    refuse: Callable[[Exception], HttpAnswer] = error_answer,
    of_bodies: Callable[..., BodyView | None] | None = None,
) -> Rule:
    """Make a rule of a path such as ``/v2/models/<model>``; a final slash does not matter, but behind a verb.

    ``<number:name>`` stands for digits, and ``<path:name>`` for all that follows; a verb is ``:`` and a word.  A rule
    that does not say what its requests need of their callers is for administrators, where callers have to be known.
    ``refuse`` answers for errors, in the form of whose path it is, and ``of_bodies`` is as :class:`Route` has it.
    """
    parts = _PLACE.split(template)
    pattern = "".join(
        re.escape(literal) + (f"(?P<{name}>{_PATTERNS[kind]})" if name else "")
        for literal, kind, name in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], ""], strict=True)
    )
    methods = frozenset({method, "HEAD"} if method == "GET" else {method})
    pattern += "" if _VERB.search(template) else "/?"
    first, options = template.split("/")[1], (is_hot, has_tasks, takes_views, admit, refuse, need, of_bodies)
    return Rule(re.compile(pattern), first, methods, view, *options)


class RoutedRequest(NamedTuple):
    """A request that is the lane's, before its body has come.

    Attributes:
        size: that of all of it.
        view: answers it by its body, and raises what is for :meth:`Router.failed`; None where all of it is needed.
    """

    head: Head
    query: str
    route: Route
    size: int
    view: BodyView | None = None


class Router:
    """Finds what answers requests, and has it answer them.

    Args:
        rules: the server's own paths.
        refusals: for what is nobody's.
        mounts: services with paths of their own; call :meth:`forget` when they change.
        cors: what browsers of other origins may do, None for nothing.
        has_limits: tells whether requests may have to be let in, as routes say.
        gate: asks who calls; None where nobody has to be known.
        observer: is told of every request; None for nobody.

    Attributes:
        answer: answers a request; every failure but cancellation, which is that of what answers, becomes an answer.  A
            stream in the answer is the caller's to close.
        heads: what fast lanes have found of requests by their heads, for as long as it holds.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        refusals: Refusals,
        mounts: Mounts | None = None,
        cors: Cors | None = None,
        *,
        has_limits: Callable[[], bool] = bool,
        gate: Gate | None = None,
        observer: RequestObserver | None = None,
    ) -> None:
        self._told = None if observer is None else ToldRequests(observer)
        # Without anybody who is told there is nothing between who asks for an answer and what answers.
        self.answer: Answering = self._answer if self._told is None else partial(self._answer_told, self._told)
        self.rules = rules
        self._own = frozenset(each.first for each in rules)
        self._refusals = refusals
        self._mounts = mounts
        self._cors = cors
        self._has_limits = has_limits
        self._gate = gate
        self._known: dict[tuple[str, str], Route | HttpAnswer] = {}
        self.heads: dict[bytes, RoutedRequest] = {}

    def forget(self) -> None:
        """Look at the mounts anew."""
        self._known.clear()
        self.heads.clear()

    def find(self, method: str, target: str) -> Route | HttpAnswer:
        """Find what answers requests for a target, which is given without its query; or the refusal of them all."""
        found = self._known.get((method, target))
        if found is None:
            found = self._look_up(method, target)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[method, target] = found
        return found

    async def admit(self, route: Route, request: HttpRequest) -> HttpAnswer | None:
        """Let a request in before its body is read; gives the refusal of one that is not.

        The place that it has then is the task's ``current_place``, and who makes it the ``current_caller``; both are
        the caller's to let go when it is answered.

        Cancellation: while it waits; nothing is held then but what the caller lets go.
        """
        try:
            if self._gate is not None:
                await self._gate.let_in(route.need, route.service, request.headers, current_certificate.get())
            if route.admit is not None and self._has_limits():
                current_place.set(await route.admit(request.method))
        except ServerError as error:
            if route.need is Need.ADMIN and isinstance(error, Unauthenticated | MissingScope):
                asked = f"{request.method} {request.path}"
                tell_refused(_pattern(route, request), error, client=request.client, about=asked)
            refusal = self.shared(challenge(route.refuse(error), error), _origin(request.headers))
            if self._told is not None:
                self._told.refused(request, refusal)
            return refusal
        return None

    def lets_in(self, route: Route) -> bool:
        """Tell whether requests of a route have to be let in by :meth:`admit`."""
        return self._gate is not None or (route.admit is not None and self._has_limits())

    def admit_now(self, route: Route, headers: tuple[tuple[str, str], ...]) -> bool:
        """Let a request in where nothing has to be waited for; False, with nothing done, where :meth:`admit` has to.

        Who makes it is the ``current_caller`` then, as there.
        """
        if self._gate is None or (route.admit is not None and self._has_limits()):
            return False
        return self._gate.let_in_now(route.need, route.service, headers)

    async def refuse(self, refusal: HttpAnswer, request: HttpRequest) -> HttpAnswer:
        """Refuse a request that nothing answers; what there is is told only to those who are known.

        Cancellation: as :meth:`admit`.
        """
        is_guarded = self._gate is not None and self._gate.guards_everything and request.method != "OPTIONS"
        unknown = Route(_unanswered, error_answer, "", need=Need.CALLER)
        told = await self.admit(unknown, request) if is_guarded else None
        try:
            if told is not None:
                return told
            answer = self.shared(refusal, _origin(request.headers))
            if self._told is not None:
                self._told.refused(request, answer)
            return answer
        finally:
            leave_caller()

    async def _answer_told(self, observer: ToldRequests, route: Route, request: HttpRequest) -> HttpAnswer:
        told = observer.begin(request)
        try:
            answer = await self._answer(route, request)
        except BaseException:
            observer.left(told)
            raise
        return observer.answered(told, answer)

    async def _answer(self, route: Route, request: HttpRequest) -> HttpAnswer:
        try:
            answer = await route.view(request)
        except Exception as error:  # noqa: BLE001 - the border of one request
            return self.failed(route, request.headers, error)
        return answer if self._cors is None else self.shared(answer, _origin(request.headers))

    def failed(self, route: Route, headers: Headers, error: Exception) -> HttpAnswer:
        """Give the answer to a request that fails; the log has what nobody foresaw."""
        return self.shared(route.refuse(_told(error, route.path, route.places)), _origin(headers))

    def routed(self, head: Head, query: str, route: Route, size: int) -> RoutedRequest:
        """Put together what is known of a request by its head, and of all others that have the same."""
        view = None if self._told is not None or route.of_bodies is None else route.of_bodies(head.headers)
        if view is not None and self._cors is not None:
            view = partial(self._shared_by, view, _origin(head.headers))
        return RoutedRequest(head, query, route, size, view)

    async def _shared_by(self, view: BodyView, origin: str, body: Any) -> HttpAnswer:
        return self.shared(await view(body), origin)

    def shared(self, answer: HttpAnswer, origin: str) -> HttpAnswer:
        """Give an answer with what a browser must know to show it to a page of another origin.

        Where the server's settings say which origins may see answers, services have no say over that.
        """
        if self._cors is None:
            return answer
        own = tuple(line for line in answer.headers if line[0] != "access-control-allow-origin")
        return replace(answer, headers=own).with_headers(self._cors.response_headers(origin))

    def _look_up(self, method: str, target: str) -> Route | HttpAnswer:
        raw = _raw_path(target)
        if raw is None:
            refuse = self._refusals.no_path if method in _METHODS else self._refusals.no_method
            return refuse(method, unquote(target))
        # An encoded slash is part of a name; decoded it would begin another segment than for a proxy's rules.
        path = unquote(_ENCODED_SLASH.sub("%252F", raw))
        if self._mounts is not None and path.split("/", 2)[1] not in self._own:
            found = self._mounts.find(method, path)
            if found is not None:
                return found
        if method not in _METHODS:
            return self._refusals.no_method(method, path)
        if ".." in path or _ENCODED_SLASH.search(raw):
            return self._refusals.no_path(method, path)
        if method == "OPTIONS" and self._cors is not None:
            return HttpAnswer(200)
        return self._match(method, path)

    def _match(self, method: str, path: str) -> Route | HttpAnswer:
        is_known = False
        for each in self.rules:
            match = each.pattern.fullmatch(path)
            if match is None:
                continue
            if method not in each.methods:
                is_known = True
                continue
            places = match.groupdict()
            view = partial(each.view, **places) if places else each.view
            options: dict[str, Any] = {"is_hot": each.is_hot, "has_tasks": each.has_tasks}
            options |= {"takes_views": each.takes_views}
            options |= {"admit": partial(each.admit, **places) if each.admit is not None else None}
            options |= {"of_bodies": partial(each.of_bodies, **places) if each.of_bodies is not None else None}
            about = places.get("model") or ""
            return Route(view, each.refuse, path, "", places, **options, need=each.need, service=about)
        return self._refusals.no_method(method, path) if is_known else self._refusals.no_path(method, path)


def _raw_path(target: str) -> str | None:
    """Return the encoded path of a request target without its query (RFC 9112, 3.2).

    The scheme and authority of the absolute form are left out, once and only at the start.  The other forms, and
    targets with a fragment, have no path: None.
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


def _told(error: Exception, path: str, places: Mapping[str, Any]) -> Exception:
    """Choose what is told of an error, and log what nobody foresaw."""
    leaves = _leaves(error)
    if len(leaves) > 1:
        log.error("request failed in several ways", path=path, exc_info=error, **places)
        return next((leaf for leaf in leaves if isinstance(leaf, ServerError)), error)
    (leaf,) = leaves
    if not isinstance(leaf, ServerError):
        log.error("request failed", path=path, exc_info=leaf, **places)
    return leaf


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def _pattern(route: Route, request: HttpRequest) -> str:
    """Name what is asked for, of which there is little: names that the client has chosen are left out."""
    names = {given: f"<{name}>" for name, given in route.places.items()}
    path = "/".join(names.get(segment, segment) for segment in request.path.split("/"))
    return f"{request.method} {path}"
