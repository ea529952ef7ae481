"""HTTP routes of KServe v2: inference, health, metadata, configuration, statistics and sequences."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import NotReady, VersionLoading
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.protocols.kserve.documents import config_document, server_extensions, server_version, statistics_document
from ovmstrio.protocols.kserve.request_templates import RestTemplates
from ovmstrio.protocols.kserve.rest_responses import HEAD_LENGTH, InferTarget, answer_infer, check_version
from ovmstrio.serving.aggregate import aggregate_sequences, aggregate_statistics
from ovmstrio.serving.interfaces import KSERVE_REST, NOT_LOADED
from ovmstrio.serving.ovms_errors import decompressed_call_body, make_admission
from ovmstrio.transport.http.responses import json_response
from ovmstrio.transport.http.router import rule

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from ovmstrio.core.http_messages import Headers, HttpRequest
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import BodyView, Rule


def kserve_rules(plane: DataPlane, max_body_bytes: int) -> list[Rule]:
    """Return the routes over one data plane."""
    known = RestTemplates.empty()

    def infer_bodies(headers: Headers, model: str, version: str = "") -> BodyView | None:
        is_encoded, head_length = _body_headers(headers)
        return None if is_encoded else partial(answer_infer, plane, known, InferTarget(model, version, head_length))

    def infer(request: HttpRequest, model: str, version: str = "") -> Awaitable[HttpAnswer]:
        is_encoded, head_length = _body_headers(request.headers)
        if is_encoded and request.view is None:
            return infer_encoded(request, model, version, head_length)
        body = request.body if request.view is None else request.view
        return answer_infer(plane, known, InferTarget(model, version, head_length), body)

    async def infer_encoded(request: HttpRequest, model: str, version: str, head_length: str | None) -> HttpAnswer:
        body = await decompressed_call_body(plane, request, model, version, limit=max_body_bytes)
        return await answer_infer(plane, known, InferTarget(model, version, head_length), body)

    admit = make_admission(plane, KSERVE_REST)
    options: dict[str, Any] = {"is_hot": True, "takes_views": True, "admit": admit, "need": Permission.INFER}
    options["of_bodies"] = infer_bodies
    calls = [rule(path, "POST", infer, **options) for path in model_paths("/infer")]
    return [*calls, *_server_rules(plane), *_model_rules(plane)]


def _body_headers(headers: Headers) -> tuple[bool, str | None]:
    """Return whether the body is encoded, and its JSON length; differing lengths give an invalid text."""
    is_encoded, found = False, None
    for key, value in headers:
        if key == "content-encoding":
            is_encoded = True
        elif key == HEAD_LENGTH and value != found:
            found = value if found is None else f"{found}, {value}"
    return is_encoded, found


def model_paths(suffix: str) -> tuple[str, str]:
    """Return the paths of a model operation, without and with a version."""
    return f"/v2/models/<model>{suffix}", f"/v2/models/<model>/versions/<version>{suffix}"


def _server_rules(plane: DataPlane) -> list[Rule]:
    async def metadata(_: HttpRequest) -> HttpAnswer:
        return json_response(
            {"name": plane.server_name, "version": server_version(), "extensions": server_extensions(plane)}
        )

    async def statistics(_: HttpRequest) -> HttpAnswer:
        return await _statistics(plane, "", "")

    return [
        rule("/v2", "GET", metadata, is_hot=True, need=Permission.CALLER),
        *health_rules(plane),
        rule("/v2/models/stats", "GET", statistics, is_hot=True, need=Permission.READ),
    ]


def health_rules(plane: DataPlane) -> list[Rule]:
    """Return the liveness and readiness routes, which are all that a probe port serves."""

    async def live(request: HttpRequest) -> HttpAnswer:
        if not plane.is_live():
            raise NotReady("Server is not live")
        return _healthy(request, "live")

    async def ready(request: HttpRequest) -> HttpAnswer:
        readiness = plane.readiness()
        if not readiness.ready:
            raise NotReady(f"Server is not ready - {readiness.reason}")
        return _healthy(request, "ready")

    return [
        rule("/v2/health/live", "GET", live, is_hot=True, need=Permission.NOTHING),
        rule("/v2/health/ready", "GET", ready, is_hot=True, need=Permission.NOTHING),
    ]


def _model_rules(plane: DataPlane) -> list[Rule]:
    async def metadata(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        known = plane.model_metadata(model, check_version(version), KSERVE_REST)
        document: dict[str, Any] = {"name": known.name, "versions": known.versions, "platform": known.platform}
        document |= {"inputs": _tensors(known.inputs), "outputs": _tensors(known.outputs), **known.extra}
        return json_response(document)

    async def model_ready(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        if not plane.model_ready(model, check_version(version), KSERVE_REST):
            raise VersionLoading(NOT_LOADED)
        return HttpAnswer(200)

    async def config(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        known = plane.model_metadata(model, check_version(version), KSERVE_REST)
        return json_response(config_document(known))

    async def statistics(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        return await _statistics(plane, model, check_version(version))

    async def sequences(_: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        alive = await aggregate_sequences(plane, model, check_version(version), KSERVE_REST)
        return json_response({"sequences": [asdict(sequence) for sequence in alive]})

    views = (
        ("", metadata),
        ("/ready", model_ready),
        ("/config", config),
        ("/stats", statistics),
        ("/sequences", sequences),
    )
    return [
        rule(path, "GET", view, is_hot=True, need=Permission.ABOUT)
        for suffix, view in views
        for path in model_paths(suffix)
    ]


def _healthy(request: HttpRequest, state: str) -> HttpAnswer:
    """Return the document that KServe clients expect; an empty body for ``HEAD``."""
    return HttpAnswer(200) if request.method == "HEAD" else json_response({state: True})


async def _statistics(plane: DataPlane, model: str, version: str) -> HttpAnswer:
    counted = await aggregate_statistics(plane, model, version, KSERVE_REST)
    return json_response({"model_stats": [statistics_document(*each) for each in counted]})


def _tensors(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": t.name, "datatype": t.datatype.name, "shape": t.reported_shape} for t in tensors]
