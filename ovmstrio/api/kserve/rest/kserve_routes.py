"""KServe v2's paths: health, metadata, readiness, the repository index, and inferences that the fast lane left."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
from quart import Blueprint, Response, request

from ovmstrio.api.bodies import read_body
from ovmstrio.api.doors import KSERVE_REST, NOT_LOADED
from ovmstrio.api.kserve.repository_index import repository_index
from ovmstrio.api.kserve.rest.infer_answer import HEAD_LENGTH
from ovmstrio.api.kserve.rest.infer_route import answer_infer, check_version
from ovmstrio.api.kserve.server_metadata import EXTENSIONS, SERVER_NAME, server_version
from ovmstrio.core.errors import MalformedJson, NotReady, VersionLoading
from ovmstrio.wire.http.answers import Answer, json_answer
from ovmstrio.wire.http.quart_answers import to_quart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["make_blueprint"]


def make_blueprint(plane: DataPlane, max_body_bytes: int) -> Blueprint:
    """Make the routes over one data plane."""
    routes = Blueprint("kserve", __name__)
    _add_server_routes(routes, plane)
    _add_model_routes(routes, plane)

    async def infer(model: str, version: str = "") -> Response:
        body = await read_body(plane, model, version, max_body_bytes)
        answer = await answer_infer(plane, model, version, body, request.headers.get(HEAD_LENGTH))
        return to_quart(answer)

    for path in _model_paths("/infer"):
        routes.add_url_rule(path, view_func=infer, methods=["POST"])
    return routes


def _add_server_routes(routes: Blueprint, plane: DataPlane) -> None:
    @routes.get("/v2")
    async def server_metadata() -> Response:
        return to_quart(json_answer({"name": SERVER_NAME, "version": server_version(), "extensions": EXTENSIONS}))

    @routes.get("/v2/health/live")
    async def live() -> Response:
        if not plane.is_live():
            raise NotReady("Server is not live")
        return _healthy("live")

    @routes.get("/v2/health/ready")
    async def ready() -> Response:
        readiness = plane.readiness()
        if not readiness.ready:
            raise NotReady(f"Server is not ready - {readiness.reason}")
        return _healthy("ready")

    @routes.get("/v2/models")
    async def models() -> Response:
        return to_quart(json_answer({"models": _index(plane, only_ready=False)}))

    @routes.post("/v2/repository/index")
    async def index() -> Response:
        sent: Any = await request.get_data()
        try:
            asked = orjson.loads(sent) if sent else {}
        except orjson.JSONDecodeError as error:
            raise MalformedJson(f"The file is not valid json - {error}") from None
        only_ready = isinstance(asked, dict) and asked.get("ready") is True
        return to_quart(json_answer(_index(plane, only_ready=only_ready)))


def _add_model_routes(routes: Blueprint, plane: DataPlane) -> None:
    async def metadata(model: str, version: str = "") -> Response:
        known = plane.model_metadata(model, check_version(version), KSERVE_REST)
        document: dict[str, Any] = {"name": known.name, "versions": known.versions, "platform": known.platform}
        document |= {"inputs": _tensors(known.inputs), "outputs": _tensors(known.outputs), **known.extra}
        return to_quart(json_answer(document))

    async def model_ready(model: str, version: str = "") -> Response:
        if not plane.model_ready(model, check_version(version), KSERVE_REST):
            raise VersionLoading(NOT_LOADED)
        return to_quart(Answer(200))

    async def config(model: str, version: str = "") -> Response:
        known = plane.model_metadata(model, check_version(version), KSERVE_REST)
        document = {"name": known.name, "platform": known.platform, "backend": "openvino", "max_batch_size": 0}
        return to_quart(
            json_answer(document | {"input": _config_tensors(known.inputs), "output": _config_tensors(known.outputs)})
        )

    async def sequences(model: str, version: str = "") -> Response:
        alive = plane.sequences(model, check_version(version), KSERVE_REST)
        return to_quart(json_answer({"sequences": [asdict(sequence) for sequence in alive]}))

    views = (("", metadata), ("/ready", model_ready), ("/config", config), ("/sequences", sequences))
    for suffix, view in views:
        for path in _model_paths(suffix):
            routes.add_url_rule(path, view_func=view, methods=["GET"])


def _model_paths(suffix: str) -> tuple[str, str]:
    return f"/v2/models/<model>{suffix}", f"/v2/models/<model>/versions/<version>{suffix}"


def _healthy(state: str) -> Response:
    """Answer without a body, as OVMS does, unless the client asks for JSON."""
    if "application/json" in request.headers.get("Accept", "").lower():
        return to_quart(json_answer({state: True}))
    return to_quart(Answer(200))


def _index(plane: DataPlane, *, only_ready: bool) -> list[dict[str, str]]:
    entries = repository_index(plane.statuses(), only_ready=only_ready)
    return [{"name": e.name, "version": e.version, "state": e.state, "reason": e.reason} for e in entries]


def _tensors(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": t.name, "datatype": t.datatype.name, "shape": t.reported_shape} for t in tensors]


def _config_tensors(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    kinds = {"BYTES": "STRING"}
    return [
        {"name": t.name, "data_type": f"TYPE_{kinds.get(t.datatype.name, t.datatype.name)}", "dims": t.reported_shape}
        for t in tensors
    ]
