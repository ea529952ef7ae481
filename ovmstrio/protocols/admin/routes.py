"""HTTP routes of OVMS administration: ``/v1/config``, ``/v1/config/reload`` and ``/metrics``."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import trio

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import ConfigError, FailedPrecondition, InvalidRequest, ModelFailure, VersionsFailure
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.protocols.admin.changes import AdminChanges
from ovmstrio.serving.aggregate import aggregate_metrics
from ovmstrio.serving.ovms_errors import INVALID_URL, status_document
from ovmstrio.telemetry.metrics import CONTENT_TYPE, OPEN_CONTENT_TYPE
from ovmstrio.transport.http.responses import accepts_gzip, json_response, quality_values
from ovmstrio.transport.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

_GZIP_LEVEL: Final = 1
_FILE_MISSING: Final = "Config file not found or cannot open."
_FILE_FAILED: Final = "Reloading config file failed. Check server logs for more info"
_VERSIONS_FAILED: Final = "Reloading models versions failed. Check server logs for more info"


def admin_rules(plane: DataPlane, changes: AdminChanges) -> list[Rule]:
    """Return the configuration routes over one data plane."""

    async def config(_: HttpRequest) -> HttpAnswer:
        return json_response(_statuses(plane))

    async def reload(request: HttpRequest) -> HttpAnswer:
        with changes.requested("reload", request):
            changed = await reload_config()
        return json_response(_statuses(plane), 201 if changed else 200)

    async def reload_config() -> bool:
        try:
            return await plane.reload_config()
        except ConfigError as error:
            raise type(error)([replace(error.problems[0], message=_FILE_MISSING, file="")]) from error
        except (FailedPrecondition, ModelFailure) as error:
            text = _VERSIONS_FAILED if isinstance(error, VersionsFailure) else _FILE_FAILED
            raise type(error)(f"{text}: {error.message}") from error

    return [
        rule("/v1/config", "GET", config, is_hot=True, need=Permission.READ),
        rule("/v1/config/reload", "POST", reload, need=Permission.ADMIN),
    ]


def metrics_rules(plane: DataPlane) -> list[Rule]:
    """Return the route of the metrics."""
    limiter = trio.CapacityLimiter(1)

    async def metrics(request: HttpRequest) -> HttpAnswer:
        parameters = parse_qs(request.query)
        families = [*parameters.get("match[]", ()), *parameters.get("name[]", ())]
        is_gzipped = accepts_gzip(request)
        is_open = _prefers_openmetrics(request.header("accept") or "")
        text = await aggregate_metrics(plane, families, limiter, is_open=is_open)
        if text is None:
            raise InvalidRequest(f"{INVALID_URL} - metrics are disabled; start with --metrics-enable")
        if is_gzipped:
            # Thousands of services make megabytes of text.
            text = await trio.to_thread.run_sync(partial(gzip.compress, text, _GZIP_LEVEL, mtime=0), limiter=limiter)
        content_type = OPEN_CONTENT_TYPE if is_open else CONTENT_TYPE
        headers = (("content-type", content_type), *((("content-encoding", "gzip"),) if is_gzipped else ()))
        return HttpAnswer(200, headers, text)

    return [rule("/metrics", "GET", metrics, is_hot=True, need=Permission.METRICS)]


def _prefers_openmetrics(accepted: str) -> bool:
    """Return whether a scraper prefers OpenMetrics to the Prometheus format."""
    weights = quality_values(accepted)
    wanted = weights.get("application/openmetrics-text", 0.0)
    return wanted > 0 and wanted >= weights.get("text/plain", 0.0)


def _statuses(plane: DataPlane) -> dict[str, Any]:
    return {name: status_document(versions) for name, versions in plane.statuses().items()}
