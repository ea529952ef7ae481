"""The paths of Triton's settings of traces and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.kserve.observation_settings import (
    TRACE_SETTINGS,
    change_log_settings,
    check_trace_settings,
    log_settings,
)
from ovmstrio.api.kserve.rest.infer_request import read_document
from ovmstrio.core.callers import Need
from ovmstrio.core.http import HttpAnswer
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.api.admin.changes import Changes
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.wire.http.router import Rule

__all__ = ["observation_rules"]

_TRACES = ("/v2/trace/setting", "/v2/models/<model>/trace/setting")


def observation_rules(changes: Changes) -> list[Rule]:
    """Make the rules."""

    async def traces(_: HttpRequest, model: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        return json_answer(TRACE_SETTINGS)

    async def set_traces(request: HttpRequest, model: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        asked = await read_document(request.body) if request.body else {}
        if asked:
            level = asked.get("trace_level")
            check_trace_settings(list(asked), level if isinstance(level, list) else [str(level)])
        return json_answer(TRACE_SETTINGS)

    async def logs(_: HttpRequest) -> HttpAnswer:
        return json_answer(log_settings())

    async def set_logs(request: HttpRequest) -> HttpAnswer:
        with changes.requested("log settings", request):
            if request.body:
                change_log_settings(await read_document(request.body))
        return json_answer(log_settings())

    return [
        *(rule(path, "GET", traces, need=Need.READ) for path in _TRACES),
        *(rule(path, "POST", set_traces, need=Need.READ) for path in _TRACES),
        rule("/v2/logging", "GET", logs, need=Need.READ),
        rule("/v2/logging", "POST", set_logs),
    ]
