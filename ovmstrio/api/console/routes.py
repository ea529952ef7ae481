"""``/console`` and ``/console/api``: the page, what it is told, and what administrators change from it."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.console.assets import INDEX, asset_answer
from ovmstrio.api.console.frames import FrameMaker
from ovmstrio.api.console.guard import ConsoleGuard
from ovmstrio.api.console.live import MOST_TRACES, Wishes, error_event, stream
from ovmstrio.api.console.service_inside import service_document
from ovmstrio.api.console.service_rows import service_rows
from ovmstrio.api.event_streams import answer_with_events
from ovmstrio.api.kserve.observation_settings import set_log_level
from ovmstrio.api.kserve.repository_index import server_version
from ovmstrio.api.kserve.repository_requests import control_of
from ovmstrio.api.kserve.rest.infer_request import parse_document
from ovmstrio.core.callers import Need, current_caller
from ovmstrio.core.errors import InvalidRequest, NotFound, NotSupported
from ovmstrio.core.http import HttpAnswer
from ovmstrio.dataplane.descriptions import DEFAULT_NAME
from ovmstrio.observability.log_level import LOG_LEVEL
from ovmstrio.observability.logs import LEVELS
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.api.admin.changes import Changes
    from ovmstrio.api.console.guard import ConsoleMode
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.observability.recent_past import RecentPast
    from ovmstrio.observability.tracing.recent import RecentTraces
    from ovmstrio.wire.http.router import Rule, View

__all__ = ["console_rules"]

_API: Final = "/console/api"
_NOT_KEPT: Final = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


def console_rules(plane: DataPlane, changes: Changes, past: RecentPast, mode: ConsoleMode) -> list[Rule]:
    """Make the rules over one data plane; none where the console is off."""
    if mode == "off":
        return []
    guard, frames = ConsoleGuard(mode), FrameMaker(plane)
    return [
        *_page_rules(guard),
        *_reading_rules(plane, past, guard),
        *_live_rules(plane, past, guard, frames),
        *_change_rules(plane, changes, guard),
    ]


def _page_rules(guard: ConsoleGuard) -> list[Rule]:
    """Make the rules of the page's files: they hold nothing of the server's, and the page asks for a key itself."""

    async def page(request: HttpRequest) -> HttpAnswer:
        guard.let_in(request)
        return asset_answer(INDEX, request)

    async def asset(request: HttpRequest, file: str) -> HttpAnswer:
        guard.let_in(request)
        return asset_answer(file, request)

    return [
        rule("/console", "GET", page, is_hot=True, need=Need.NOTHING),
        rule("/console/page/<file>", "GET", asset, is_hot=True, need=Need.NOTHING),
    ]


def _reading_rules(plane: DataPlane, past: RecentPast, guard: ConsoleGuard) -> list[Rule]:
    def reading(path: str, tell: Any) -> Rule:
        async def answer(request: HttpRequest, **places: str) -> HttpAnswer:
            guard.let_in(request)
            return json_answer(tell(**places)).with_headers(_NOT_KEPT)

        return rule(f"{_API}/{path}", "GET", answer, is_hot=True, need=Need.READ)

    return [
        reading("server", lambda: _server(plane)),
        reading("services", lambda: {"services": list(service_rows(plane).values())}),
        reading("services/<model>", lambda model: service_document(plane, model)),
        reading("failures", lambda: {"failures": [asdict(each) for each in past.failures.since(0)]}),
        reading("traces", lambda: {"traces": [each.summary() for each in _recent(plane).traces(MOST_TRACES)]}),
        reading("traces/<trace>", lambda trace: _trace(plane, trace)),
        reading("log", lambda: {"lines": [asdict(each) for each in past.log.since(0)]}),
    ]


def _live_rules(plane: DataPlane, past: RecentPast, guard: ConsoleGuard, frames: FrameMaker) -> list[Rule]:
    async def live(request: HttpRequest) -> HttpAnswer:
        guard.let_in(request)
        wishes = Wishes.read(request.query)
        return await answer_with_events(request, partial(stream, plane, frames, past, wishes), error_event)

    return [rule(f"{_API}/live", "GET", live, is_hot=True, has_tasks=True, need=Need.READ)]


def _change_rules(plane: DataPlane, changes: Changes, guard: ConsoleGuard) -> list[Rule]:
    def changing(path: str, view: View) -> Rule:
        async def answer(request: HttpRequest, **places: str) -> HttpAnswer:
            guard.let_change(request)
            told = await view(request, **places)
            return told.with_headers(_NOT_KEPT)

        return rule(f"{_API}/{path}", "POST", answer)

    async def reload(request: HttpRequest) -> HttpAnswer:
        with changes.making("reload", request.client):
            changed = await plane.reload_config()
        return json_answer({"changed": changed})

    async def load(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.making("load", request.client, model=model):
            await control_of(plane).load(model)
        return json_answer({"loaded": model})

    async def unload(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.making("unload", request.client, model=model):
            await control_of(plane).unload(model)
        return json_answer({"unloaded": model})

    async def log_level(request: HttpRequest) -> HttpAnswer:
        with changes.making("log level", request.client):
            set_log_level(_level(request))
        return json_answer({"level": logging.getLevelName(LOG_LEVEL.value)})

    return [
        changing("reload", reload),
        changing("services/<model>/load", load),
        changing("services/<model>/unload", unload),
        changing("log_level", log_level),
    ]


def _recent(plane: DataPlane) -> RecentTraces:
    if plane.traces is None:
        raise NotSupported("this server keeps no traces")
    return plane.traces


def _trace(plane: DataPlane, trace_id: str) -> dict[str, Any]:
    found = _recent(plane).trace(trace_id)
    if found is None:
        raise NotFound(
            f"no trace {trace_id[:40]!r} is kept; those are of the last calls that came while somebody looked"
        )
    return found.document()


def _level(request: HttpRequest) -> int:
    asked = parse_document(request.body).get("level")
    if not isinstance(asked, str) or asked.upper() not in LEVELS:
        raise InvalidRequest(f"level: expected one of {', '.join(LEVELS)}, got {str(asked)[:40]!r}")
    return LEVELS[asked.upper()]


def _server(plane: DataPlane) -> dict[str, Any]:
    readiness, caller = plane.readiness(), current_caller.get()
    return {
        # The name by default is for clients that look for it.
        "name": "ovmstrio" if plane.server_name == DEFAULT_NAME else plane.server_name,
        "version": server_version(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "ready": readiness.ready,
        "reason": readiness.reason,
        "caller": "" if caller is None else caller.name,
        "may_change": caller is None or caller.scopes.admin,
        "loads_by_name": plane.control is not None,
        "log_level": logging.getLevelName(LOG_LEVEL.value),
        "has_metrics": plane.render_metrics(["ovmstrio_ready"]) is not None,
    }
