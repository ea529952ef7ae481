"""HTTP routes of the API documentation: ``/``, ``/openapi.json`` and ``/v2/docs``."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.callers import Need
from ovmstrio.core.http import HttpAnswer
from ovmstrio.protocols.kserve.documents import server_version
from ovmstrio.protocols.openapi.document import openapi_document
from ovmstrio.transport.http.responses import json_answer
from ovmstrio.transport.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.core.http import Headers, HttpRequest
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

__all__ = ["describing_rules"]

_DOCUMENT: Final = "/openapi.json"
_PAGE: Final = "/v2/docs"
_PAGE_HEADERS: Final[Headers] = (
    ("content-type", "text/html; charset=utf-8"),
    # The page is self-contained: nothing is loaded from other hosts.
    (
        "content-security-policy",
        (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
            "base-uri 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
)


def describing_rules(plane: DataPlane, *, has_root: bool) -> list[Rule]:
    """Return the routes; with ``has_root`` a service owns ``/``."""

    async def document(_: HttpRequest) -> HttpAnswer:
        return json_answer(openapi_document(plane, server_version()))

    async def page(_: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, _PAGE_HEADERS, _page())

    async def here(request: HttpRequest) -> HttpAnswer:
        if "text/html" in (request.header("accept") or ""):
            return HttpAnswer(302, (("location", _PAGE),))
        return json_answer(_overview(plane))

    rules = [rule(_DOCUMENT, "GET", document, need=Need.READ), rule(_PAGE, "GET", page, need=Need.READ)]
    return rules if has_root else [*rules, rule("/", "GET", here, need=Need.READ)]


@cache
def _page() -> bytes:
    return files("ovmstrio.protocols.openapi").joinpath("page.html").read_bytes()


def _overview(plane: DataPlane) -> dict[str, Any]:
    readiness = plane.readiness()
    services = [
        {
            "name": each.name,
            "kind": plane.registry.kind_of(each.name),
            "version": each.version,
            "state": each.state.name,
        }
        for statuses in plane.statuses().values()
        for each in statuses
    ]
    further = {"docs": _PAGE, "openapi": _DOCUMENT, "health": "/v2/health/ready", "states": "/v1/config"}
    if plane.render_metrics() is not None:
        further["metrics"] = "/metrics"
    state = {"ready": readiness.ready} | ({} if readiness.ready else {"reason": readiness.reason})
    return {"name": plane.server_name, "version": server_version(), **state, "services": services, "next": further}
