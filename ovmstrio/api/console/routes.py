"""``/console`` and ``/console/api``: the page, what it is told, and what administrators change from it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.console.assets import INDEX, asset_answer
from ovmstrio.api.console.frames import FrameMaker
from ovmstrio.api.console.gathering import FAILURES, LINES, TRACES, Gathering
from ovmstrio.api.console.guard import ConsoleGuard
from ovmstrio.api.console.live import Viewers, Wishes, error_event, stream, told_failures
from ovmstrio.api.event_streams import answer_with_events
from ovmstrio.api.kserve.observation_settings import change_log_settings, set_log_level
from ovmstrio.api.kserve.repository_index import server_version
from ovmstrio.api.kserve.repository_requests import control_of
from ovmstrio.api.kserve.rest.infer_request import read_document
from ovmstrio.core.callers import Need, current_caller, current_certificate
from ovmstrio.core.errors import InvalidRequest, NotSupported, PermissionDenied
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.texts import shown
from ovmstrio.dataplane.descriptions import DEFAULT_NAME
from ovmstrio.observability.log_level import LOG_LEVEL
from ovmstrio.observability.log_trees import written_log_levels
from ovmstrio.observability.logs import LEVELS
from ovmstrio.observability.refused_changes import tell_refused
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.access.gate import Gate
    from ovmstrio.api.admin.changes import Changes
    from ovmstrio.api.console.guard import ConsoleMode
    from ovmstrio.api.event_streams import EventSink
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.observability.recent_past import RecentPast
    from ovmstrio.wire.http.router import Rule, View

__all__ = ["console_rules"]

_API: Final = "/console/api"
_PARTS: Final = "log_levels"
_LONGEST: Final = 80
_NOT_KEPT: Final = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


def console_rules(
    plane: DataPlane, changes: Changes, past: RecentPast, mode: ConsoleMode, gate: Gate | None = None
) -> list[Rule]:
    """Make the rules over one data plane; none where the console is off.  The gate ends streams of callers that go."""
    if mode == "off":
        return []
    guard, gathering = ConsoleGuard(mode), Gathering(plane, past)
    return [
        *_page_rules(guard),
        *_reading_rules(plane, changes, gathering, guard),
        *_live_rules(plane, changes, gathering, guard, gate),
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


def _reading_rules(plane: DataPlane, changes: Changes, gathering: Gathering, guard: ConsoleGuard) -> list[Rule]:
    past = gathering.past

    async def server(request: HttpRequest) -> HttpAnswer:
        guard.let_in(request)
        return json_answer(_server(plane, may_change=changes.lets_page(request))).with_headers(_NOT_KEPT)

    def reading(path: str, tell: Any) -> Rule:
        async def answer(request: HttpRequest, **places: str) -> HttpAnswer:
            guard.let_in(request)
            return json_answer(await tell(**places)).with_headers(_NOT_KEPT)

        return rule(f"{_API}/{path}", "GET", answer, is_hot=True, need=Need.READ)

    async def failures(request: HttpRequest) -> HttpAnswer:
        guard.let_in(request)
        await gathering.look_back(FAILURES)
        told = told_failures(past, 0, shows_bodies=changes.lets_page(request))
        return json_answer({"failures": told}).with_headers(_NOT_KEPT)

    async def services() -> dict[str, Any]:
        return {"services": list((await gathering.rows()).values())}

    async def service(model: str) -> dict[str, Any]:
        return await gathering.document(model)

    async def traces() -> dict[str, Any]:
        _check_traces(plane)
        await gathering.look_back(TRACES)
        return {"traces": past.traces}

    async def trace(trace: str) -> dict[str, Any]:
        _check_traces(plane)
        return await gathering.trace(trace)

    async def log() -> dict[str, Any]:
        await gathering.look_back(LINES)
        return {"lines": past.lines.since(0)}

    return [
        rule(f"{_API}/server", "GET", server, is_hot=True, need=Need.READ),
        rule(f"{_API}/failures", "GET", failures, is_hot=True, need=Need.READ),
        reading("services", services),
        reading("services/<model>", service),
        reading("traces", traces),
        reading("traces/<trace>", trace),
        reading("log", log),
    ]


def _live_rules(
    plane: DataPlane, changes: Changes, gathering: Gathering, guard: ConsoleGuard, gate: Gate | None
) -> list[Rule]:
    viewers, frames = Viewers(), FrameMaker(plane, gathering)

    async def live(request: HttpRequest) -> HttpAnswer:
        guard.let_in(request)
        wishes = Wishes.read(request.query)

        async def still_may() -> bool:
            known = None
            if gate is not None:
                known = await gate.look_again(Need.READ, request.headers, current_certificate.get())
            return changes.lets_page(request) if known is None else known.scopes.admin

        async def make(events: EventSink) -> None:
            with viewers.one():
                await stream(plane, frames, gathering, wishes, events, still_may=still_may)

        return await answer_with_events(request, make, error_event)

    return [rule(f"{_API}/live", "GET", live, is_hot=True, has_tasks=True, need=Need.READ)]


def _change_rules(plane: DataPlane, changes: Changes, guard: ConsoleGuard) -> list[Rule]:
    def changing(path: str, view: View) -> Rule:
        async def answer(request: HttpRequest, **places: str) -> HttpAnswer:
            try:
                guard.let_change(request)
            except PermissionDenied as error:
                tell_refused(f"console {path}", error, client=request.client, about=request.path)
                raise
            told = await view(request, **places)
            return told.with_headers(_NOT_KEPT)

        return rule(f"{_API}/{path}", "POST", answer)

    async def reload(request: HttpRequest) -> HttpAnswer:
        with changes.requested("reload", request):
            changed = await plane.reload_config()
        return json_answer({"changed": changed})

    async def load(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("load", request, model=model):
            await control_of(plane).load(model)
        return json_answer({"loaded": model})

    async def unload(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("unload", request, model=model):
            await control_of(plane).unload(model)
        return json_answer({"unloaded": model})

    async def log_level(request: HttpRequest) -> HttpAnswer:
        with changes.requested("log level", request):
            _set_levels(await read_document(request.body))
        return json_answer(_levels("level"))

    return [
        changing("reload", reload),
        changing("services/<model>/load", load),
        changing("services/<model>/unload", unload),
        changing("log_level", log_level),
    ]


def _check_traces(plane: DataPlane) -> None:
    if plane.traces is None:
        raise NotSupported("this server keeps no traces")


def _set_levels(asked: dict[str, Any]) -> None:
    """Set the level of the log, those of its parts, or both; neither is set if one of them is none.

    Raises:
        InvalidRequest: there is no such level or setting.
    """
    if not asked or asked.keys() - {"level", _PARTS}:
        raise InvalidRequest(f"expected level, {_PARTS} or both, got {shown(list(asked), _LONGEST)}")
    level, parts = asked.get("level", "INFO"), asked.get(_PARTS, "")
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise InvalidRequest(f"level: expected one of {', '.join(LEVELS)}, got {shown(level, _LONGEST)}")
    if not isinstance(parts, str):
        raise InvalidRequest(f"{_PARTS}: expected a text, got {shown(parts, _LONGEST)}")
    if _PARTS in asked:
        change_log_settings({_PARTS: parts})
    if "level" in asked:
        set_log_level(LEVELS[level.upper()])


def _levels(name: str) -> dict[str, str]:
    """Tell from what level on is logged, by a name, and the levels of parts of the log."""
    return {name: logging.getLevelName(LOG_LEVEL.value), _PARTS: written_log_levels(LOG_LEVEL.parts)}


def _server(plane: DataPlane, *, may_change: bool) -> dict[str, Any]:
    readiness, caller = plane.readiness(), current_caller.get()
    return {
        # The name by default is for clients that look for it.
        "name": "ovmstrio" if plane.server_name == DEFAULT_NAME else plane.server_name,
        "version": server_version(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "ready": readiness.ready,
        "reason": readiness.reason,
        "caller": "" if caller is None else caller.name,
        "may_change": may_change,
        "loads_by_name": plane.control is not None,
        **({} if plane.siblings is None else {"worker": plane.siblings.row}),
        "workers": 1 if plane.siblings is None else len(plane.siblings.others) + 1,
        "workers_reason": plane.workers_reason,
        **_levels("log_level"),
        "has_metrics": plane.render_metrics(["ovmstrio_ready"]) is not None,
    }
