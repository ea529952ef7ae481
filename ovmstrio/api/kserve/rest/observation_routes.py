"""The paths of Triton's settings of traces and logs, of which this server has no such ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.kserve.observation_settings import TRACE_SETTINGS, check_trace_settings, refuse_log_settings
from ovmstrio.api.kserve.rest.infer_request import parse_document
from ovmstrio.core.http import HttpAnswer
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.wire.http.router import Rule

__all__ = ["observation_rules"]

_TRACES = ("/v2/trace/setting", "/v2/models/<model>/trace/setting")


def observation_rules() -> list[Rule]:
    """Make the rules."""

    async def traces(_: HttpRequest, model: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        return json_answer(TRACE_SETTINGS)

    async def set_traces(request: HttpRequest, model: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        asked = parse_document(request.body) if request.body else {}
        if asked:
            level = asked.get("trace_level")
            check_trace_settings(list(asked), level if isinstance(level, list) else [str(level)])
        return json_answer(TRACE_SETTINGS)

    async def logs(_: HttpRequest) -> HttpAnswer:
        refuse_log_settings()
        return HttpAnswer(200)

    return [
        *(rule(path, "GET", traces) for path in _TRACES),
        *(rule(path, "POST", set_traces) for path in _TRACES),
        rule("/v2/logging", "GET", logs),
        rule("/v2/logging", "POST", logs),
    ]
