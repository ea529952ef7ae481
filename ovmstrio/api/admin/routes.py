"""OVMS's administration paths: the configuration's state and reload, and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.api.refusals import INVALID_URL, status_document
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.http import HttpAnswer
from ovmstrio.observability.metrics import CONTENT_TYPE
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.router import Rule

__all__ = ["admin_rules", "metrics_rules"]


def admin_rules(plane: DataPlane) -> list[Rule]:
    """Make the rules over one data plane."""

    async def config(_: HttpRequest) -> HttpAnswer:
        return json_answer(_statuses(plane))

    async def reload(_: HttpRequest) -> HttpAnswer:
        changed = await plane.reload_config()
        return json_answer(_statuses(plane), 201 if changed else 200)

    return [rule("/v1/config", "GET", config), rule("/v1/config/reload", "POST", reload)]


def metrics_rules(plane: DataPlane) -> list[Rule]:
    """Make the rule of what scrapers get."""

    async def metrics(_: HttpRequest) -> HttpAnswer:
        text = plane.render_metrics()
        if text is None:
            raise InvalidRequest(f"{INVALID_URL} - metrics are disabled; --metrics_enable turns them on")
        return HttpAnswer(200, (("content-type", CONTENT_TYPE),), text)

    return [rule("/metrics", "GET", metrics)]


def _statuses(plane: DataPlane) -> dict[str, Any]:
    return {name: status_document(versions) for name, versions in plane.statuses().items()}
