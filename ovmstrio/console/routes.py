"""HTTP routes of the console: ``/console`` (page) and ``/console/api`` (data, event stream, admin actions)."""

from __future__ import annotations

import gzip
import hashlib
import logging
import sys
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, Literal

from ovmstrio.console.aggregator import FAILURES, LINES, TRACES, ConsoleAggregator
from ovmstrio.console.stream import (
    FrameMaker,
    StreamCounter,
    StreamFilter,
    encode_error_event,
    failure_entries,
    send_events,
)
from ovmstrio.core.callers import Permission, current_caller
from ovmstrio.core.errors import InvalidRequest, NotFound, NotSupported, PermissionDenied
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.protocols.admin.changes import check_is_local, cross_origin, cross_site, is_local_host_name
from ovmstrio.protocols.kserve.extensions import change_log_settings, server_version, set_log_level
from ovmstrio.protocols.kserve.rest_requests import read_document
from ovmstrio.serving.broadcast_changes import server_model_control
from ovmstrio.serving.data_plane import DEFAULT_SERVER_NAME
from ovmstrio.telemetry.log_levels import LOG_LEVEL, format_log_levels
from ovmstrio.telemetry.logs import LEVELS
from ovmstrio.transport.http.responses import accepts_gzip, json_response
from ovmstrio.transport.http.router import rule
from ovmstrio.transport.http.sse import stream_events
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from ovmstrio.auth.gate import Gate
    from ovmstrio.core.http_messages import Headers, HttpRequest
    from ovmstrio.protocols.admin.changes import AdminChanges
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.telemetry.recent_history import RecentHistory
    from ovmstrio.transport.http.router import Rule, View
    from ovmstrio.transport.http.sse import EventSink

# Static files

_INDEX: Final = "index.html"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}

_security_headers: Final[Headers] = (
    (
        "content-security-policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


@cache
def asset_names() -> frozenset[str]:
    """Return the names of all files of the page."""
    return frozenset(each.name for each in files("ovmstrio.console").joinpath("page").iterdir() if each.is_file())


@cache
def _packed(name: str) -> tuple[bytes, bytes, str]:
    content = files("ovmstrio.console").joinpath("page", name).read_bytes()
    return content, gzip.compress(content, 9, mtime=0), f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def _asset_answer(name: str, request: HttpRequest) -> HttpAnswer:
    if name not in asset_names():
        raise NotFound(f"console: no file {shown(name, 80)}")
    content, packed, mark = _packed(name)
    kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    headers = (
        ("content-type", kind),
        ("cache-control", "no-cache"),
        ("etag", mark),
        ("vary", "accept-encoding"),
        *_security_headers,
    )
    if request.header("if-none-match") == mark:
        return HttpAnswer(304, headers)
    if accepts_gzip(request):
        return HttpAnswer(200, (*headers, ("content-encoding", "gzip")), packed)
    return HttpAnswer(200, headers, content)


# Access

ConsoleMode = Literal["off", "local", "on"]

CHANGE_HEADER: Final = "x-ovms-console"
"""Header of requests that change the server; a form of another site cannot send it."""


class _ConsoleGuard:
    """Access check of console requests; ``local`` mode admits clients of this machine only."""

    def __init__(self, mode: ConsoleMode) -> None:
        self._is_local = mode == "local"

    def check_read(self, request: HttpRequest) -> None:
        """Raise ``PermissionDenied`` for a remote client or a page of another origin."""
        if self._is_local:
            _check_local(request)
        _check_origin(request)

    def check_change(self, request: HttpRequest) -> None:
        """Check a request that changes the server: it needs the change header, too."""
        self.check_read(request)
        if request.header(CHANGE_HEADER) is None:
            raise PermissionDenied(f"console: expected header {CHANGE_HEADER}: 1 on requests that change the server")


def may_open_console(mode: ConsoleMode, request: HttpRequest) -> bool:
    """Return whether the client of a request may open the page of the console."""
    if mode == "off":
        return False
    try:
        _ConsoleGuard(mode).check_read(request)
    except PermissionDenied:
        return False
    return True


def _check_local(request: HttpRequest) -> None:
    hint = "--console on admits other machines, best with --keys-file"
    check_is_local(request.client, "the console is for this machine", hint)
    host = request.header("host") or ""
    # DNS rebinding: a foreign name that resolves to this machine would make its page same-origin.
    if current_caller.get() is None and not is_local_host_name(host):
        raise PermissionDenied(f"console: expected Host localhost or an IP address, got {shown(host, 80)}; {hint}")


def _check_origin(request: HttpRequest) -> None:
    site, origin = cross_site(request), cross_origin(request)
    # Following a link from another site is allowed; requests by another site's scripts are not.
    follows_link = request.header("sec-fetch-mode") == "navigate" and request.method in {"GET", "HEAD"}
    if site and not follows_link:
        raise PermissionDenied(f"console: {site} request refused")
    if origin:
        raise PermissionDenied(f"console: cross-origin request from {origin} refused")


# Routes

_API: Final = "/console/api"
_PARTS: Final = "log_levels"
_MAX_SHOWN_CHARACTERS: Final = 80
_NO_STORE: Final = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


def console_rules(
    plane: DataPlane, changes: AdminChanges, history: RecentHistory, mode: ConsoleMode, gate: Gate | None = None
) -> list[Rule]:
    """Return the routes, none if the console is off; ``gate`` ends event streams whose caller was revoked."""
    if mode == "off":
        return []
    guard, gathering = _ConsoleGuard(mode), ConsoleAggregator(plane, history)
    frames = FrameMaker(plane, gathering)
    history.sample = frames.sample
    return [
        *_page_rules(guard),
        *_reading_rules(plane, changes, gathering, guard),
        *_live_rules(plane, changes, frames, guard, gate),
        *_change_rules(plane, changes, guard),
    ]


def _page_rules(guard: _ConsoleGuard) -> list[Rule]:
    """Return the routes of the static files, which hold no server data: the page itself asks for a key."""

    async def page(request: HttpRequest) -> HttpAnswer:
        guard.check_read(request)
        return _asset_answer(_INDEX, request)

    async def asset(request: HttpRequest, file: str) -> HttpAnswer:
        guard.check_read(request)
        return _asset_answer(file, request)

    return [
        rule("/console", "GET", page, is_hot=True, need=Permission.NOTHING),
        rule("/console/page/<file>", "GET", asset, is_hot=True, need=Permission.NOTHING),
    ]


def _reading_rules(
    plane: DataPlane, changes: AdminChanges, aggregator: ConsoleAggregator, guard: _ConsoleGuard
) -> list[Rule]:
    past = aggregator.past

    async def server(request: HttpRequest) -> HttpAnswer:
        guard.check_read(request)
        return json_response(_server(plane, may_change=changes.page_may_change(request))).with_headers(_NO_STORE)

    def reading(path: str, read: Any) -> Rule:
        async def answer(request: HttpRequest, **places: str) -> HttpAnswer:
            guard.check_read(request)
            return json_response(await read(**places)).with_headers(_NO_STORE)

        return rule(f"{_API}/{path}", "GET", answer, is_hot=True, need=Permission.READ)

    async def failures(request: HttpRequest) -> HttpAnswer:
        guard.check_read(request)
        await aggregator.fetch_history(FAILURES)
        entries = failure_entries(past, 0, shows_bodies=changes.page_may_change(request))
        return json_response({"failures": entries, "groups": past.failure_groups}).with_headers(_NO_STORE)

    async def services() -> dict[str, Any]:
        return {"services": list((await aggregator.rows()).values())}

    async def service(model: str) -> dict[str, Any]:
        return await aggregator.document(model)

    async def traces() -> dict[str, Any]:
        _check_traces(plane)
        await aggregator.fetch_history(TRACES)
        return {"traces": past.traces}

    async def trace(trace: str) -> dict[str, Any]:
        _check_traces(plane)
        return await aggregator.trace(trace)

    async def log() -> dict[str, Any]:
        await aggregator.fetch_history(LINES)
        return {"lines": past.lines.since(0)}

    return [
        rule(f"{_API}/server", "GET", server, is_hot=True, need=Permission.READ),
        rule(f"{_API}/failures", "GET", failures, is_hot=True, need=Permission.READ),
        reading("services", services),
        reading("services/<model>", service),
        reading("series", aggregator.series_document),
        reading("services/<service>/series", aggregator.series_document),
        reading("traces", traces),
        reading("traces/<trace>", trace),
        reading("log", log),
    ]


def _live_rules(
    plane: DataPlane, changes: AdminChanges, frames: FrameMaker, guard: _ConsoleGuard, gate: Gate | None
) -> list[Rule]:
    viewers = StreamCounter()

    async def live(request: HttpRequest) -> HttpAnswer:
        guard.check_read(request)
        wanted = StreamFilter.read(request.query)

        async def still_may() -> bool:
            known = None
            if gate is not None:
                known = await gate.reauthenticate(Permission.READ, request.headers, request.peer.certificate)
            return changes.page_may_change(request) if known is None else known.scopes.admin

        async def make(events: EventSink) -> None:
            with viewers.one():
                await send_events(plane, frames, wanted, events, may_see_bodies=still_may)

        return await stream_events(request, make, encode_error_event)

    return [rule(f"{_API}/live", "GET", live, is_hot=True, has_tasks=True, need=Permission.READ)]


def _change_rules(plane: DataPlane, changes: AdminChanges, guard: _ConsoleGuard) -> list[Rule]:
    def changing(path: str, view: View) -> Rule:
        async def answer(request: HttpRequest, **places: str) -> HttpAnswer:
            try:
                guard.check_change(request)
            except PermissionDenied as error:
                changes.denials.log_denied(f"console {path}", error, client=request.client, about=request.path)
                raise
            return (await view(request, **places)).with_headers(_NO_STORE)

        return rule(f"{_API}/{path}", "POST", answer, need=Permission.ADMIN)

    async def reload(request: HttpRequest) -> HttpAnswer:
        with changes.requested("reload", request):
            changed = await plane.reload_config()
        return json_response({"changed": changed})

    async def load(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("load", request, model=model):
            await server_model_control(plane).load(model)
        return json_response({"loaded": model})

    async def unload(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("unload", request, model=model):
            await server_model_control(plane).unload(model)
        return json_response({"unloaded": model})

    async def log_level(request: HttpRequest) -> HttpAnswer:
        with changes.requested("log level", request):
            _set_levels(await read_document(request.body))
        return json_response(_levels("level"))

    return [
        changing("reload", reload),
        changing("services/<model>/load", load),
        changing("services/<model>/unload", unload),
        changing("log_level", log_level),
    ]


def _check_traces(plane: DataPlane) -> None:
    if plane.traces is None:
        raise NotSupported("this server does not record traces")


def _set_levels(settings: dict[str, Any]) -> None:
    """Set the log level, the logger levels, or both, after validating both."""
    if not settings or settings.keys() - {"level", _PARTS}:
        raise InvalidRequest(f"expected level, {_PARTS} or both, got {shown(list(settings), _MAX_SHOWN_CHARACTERS)}")
    level, parts = settings.get("level", "INFO"), settings.get(_PARTS, "")
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise InvalidRequest(f"level: expected one of {', '.join(LEVELS)}, got {shown(level, _MAX_SHOWN_CHARACTERS)}")
    if not isinstance(parts, str):
        raise InvalidRequest(f"{_PARTS}: expected a text, got {shown(parts, _MAX_SHOWN_CHARACTERS)}")
    if _PARTS in settings:
        change_log_settings({_PARTS: parts})
    if "level" in settings:
        set_log_level(LEVELS[level.upper()])


def _levels(name: str) -> dict[str, str]:
    return {name: logging.getLevelName(LOG_LEVEL.value), _PARTS: format_log_levels(LOG_LEVEL.parts)}


def _server(plane: DataPlane, *, may_change: bool) -> dict[str, Any]:
    readiness, caller = plane.readiness(), current_caller.get()
    return {
        # Some clients compare the default name, so only the console shows another one.
        "name": "ovmstrio" if plane.server_name == DEFAULT_SERVER_NAME else plane.server_name,
        "version": server_version(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "ready": readiness.ready,
        "reason": readiness.reason,
        "caller": "" if caller is None else caller.name,
        "may_change": may_change,
        "loads_by_name": plane.control is not None,
        **({} if plane.peers is None else {"worker": plane.peers.row}),
        "workers": 1 if plane.peers is None else len(plane.peers.others) + 1,
        "workers_reason": plane.workers_reason,
        **_levels("log_level"),
        "has_metrics": plane.render_metrics(["ovmstrio_ready"]) is not None,
    }
