"""OVMS's administration paths: the configuration's state and reload, and metrics."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import trio

from ovmstrio.core.callers import Need
from ovmstrio.core.errors import ConfigError, FailedPrecondition, InvalidRequest, ModelFailure, VersionsFailure
from ovmstrio.core.http import HttpAnswer
from ovmstrio.protocols.admin.changes import Changes
from ovmstrio.serving.aggregate import metrics_of_all
from ovmstrio.serving.ovms_errors import INVALID_URL, status_document
from ovmstrio.telemetry.metrics import CONTENT_TYPE, OPEN_CONTENT_TYPE
from ovmstrio.transport.http.responses import json_answer
from ovmstrio.transport.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

__all__ = ["admin_rules", "metrics_rules"]

_LEVEL: Final = 1
_FILE_MISSING: Final = "Config file not found or cannot open."
_FILE_FAILED: Final = "Reloading config file failed. Check server logs for more info"
_VERSIONS_FAILED: Final = "Reloading models versions failed. Check server logs for more info"


def admin_rules(plane: DataPlane, changes: Changes) -> list[Rule]:
    """Make the rules over one data plane."""

    async def config(_: HttpRequest) -> HttpAnswer:
        return json_answer(_statuses(plane))

    async def reload(request: HttpRequest) -> HttpAnswer:
        with changes.requested("reload", request):
            changed = await reload_config()
        return json_answer(_statuses(plane), 201 if changed else 200)

    async def reload_config() -> bool:
        try:
            return await plane.reload_config()
        except ConfigError as error:
            raise type(error)([replace(error.problems[0], message=_FILE_MISSING, file="")]) from error
        except (FailedPrecondition, ModelFailure) as error:
            text = _VERSIONS_FAILED if isinstance(error, VersionsFailure) else _FILE_FAILED
            raise type(error)(f"{text}: {error.message}") from error

    return [rule("/v1/config", "GET", config, is_hot=True, need=Need.READ), rule("/v1/config/reload", "POST", reload)]


def metrics_rules(plane: DataPlane) -> list[Rule]:
    """Make the rule of what scrapers get."""
    limiter = trio.CapacityLimiter(1)

    async def metrics(request: HttpRequest) -> HttpAnswer:
        asked = parse_qs(request.query)
        families = [*asked.get("match[]", ()), *asked.get("name[]", ())]
        packs = "gzip" in (request.header("accept-encoding") or "")
        is_open = _wants_open(request.header("accept") or "")
        text = await metrics_of_all(plane, families, limiter, is_open=is_open)
        if text is None:
            raise InvalidRequest(f"{INVALID_URL} - metrics are disabled; --metrics_enable turns them on")
        if packs:
            # With thousands of services there are megabytes of them.
            text = await trio.to_thread.run_sync(partial(gzip.compress, text, _LEVEL, mtime=0), limiter=limiter)
        kind = OPEN_CONTENT_TYPE if is_open else CONTENT_TYPE
        headers = (("content-type", kind), *((("content-encoding", "gzip"),) if packs else ()))
        return HttpAnswer(200, headers, text)

    return [rule("/metrics", "GET", metrics, is_hot=True, need=Need.METRICS)]


def _wants_open(accepted: str) -> bool:
    """Tell whether a scraper likes OpenMetrics's format, and no less than Prometheus's."""
    weights = {}
    for each in accepted.split(","):
        kind, *parameters = (part.strip() for part in each.lower().split(";"))
        given = next((one[2:] for one in parameters if one.startswith("q=")), "1")
        weights[kind] = float(given) if given.replace(".", "", 1).isdecimal() else 0.0
    wanted = weights.get("application/openmetrics-text", 0.0)
    return wanted > 0 and wanted >= weights.get("text/plain", 0.0)


def _statuses(plane: DataPlane) -> dict[str, Any]:
    return {name: status_document(versions) for name, versions in plane.statuses().items()}
