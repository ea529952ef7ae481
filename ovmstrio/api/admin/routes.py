"""OVMS's administration paths: the configuration's state and reload, and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint, Response

from ovmstrio.api.status_document import status_document
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.observability.metrics import CONTENT_TYPE
from ovmstrio.wire.http.answers import Answer, json_answer
from ovmstrio.wire.http.quart_answers import to_quart

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["make_blueprint"]


def make_blueprint(plane: DataPlane) -> Blueprint:
    """Make the routes over one data plane."""
    routes = Blueprint("admin", __name__)

    @routes.get("/v1/config")
    async def config() -> Response:
        return to_quart(json_answer(_statuses(plane)))

    @routes.post("/v1/config/reload")
    async def reload() -> Response:
        changed = await plane.reload_config()
        return to_quart(json_answer(_statuses(plane), 201 if changed else 200))

    @routes.get("/metrics")
    async def metrics() -> Response:
        text = plane.render_metrics()
        if text is None:
            raise InvalidRequest("Invalid request URL - metrics are disabled; --metrics_enable turns them on")
        return to_quart(Answer(200, text, {"Content-Type": CONTENT_TYPE}))

    return routes


def _statuses(plane: DataPlane) -> dict[str, Any]:
    return {name: status_document(versions) for name, versions in plane.statuses().items()}
