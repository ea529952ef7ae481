"""TensorFlow Serving's paths: predict, status and metadata of what is below ``/v1/models``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response, request

from ovmstrio.api.bodies import read_body
from ovmstrio.api.doors import MODEL_MISSING, TENSORFLOW_REST
from ovmstrio.api.status_document import status_document
from ovmstrio.api.tensorflow.rest.metadata_document import metadata_document
from ovmstrio.api.tensorflow.rest.predict_route import answer_predict
from ovmstrio.api.tensorflow.rest.targets import read_target
from ovmstrio.core.errors import NotFound
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.quart_answers import to_quart

if TYPE_CHECKING:
    from ovmstrio.api.tensorflow.rest.targets import Target
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.answers import Answer

__all__ = ["make_blueprint"]


def make_blueprint(plane: DataPlane, max_body_bytes: int) -> Blueprint:
    """Make the routes over one data plane.

    The framework knows two paths only: which operation a path means is decided here, because a colon and a slash part
    it, and because OVMS answers a wrong method even where the servable does not exist.
    """
    routes = Blueprint("tensorflow", __name__)

    @routes.get("/v1/models")
    async def no_name() -> Response:
        raise NotFound(MODEL_MISSING)

    @routes.route("/v1/models/<path:path>", methods=["GET", "POST"])
    async def answer(path: str) -> Response:
        target = read_target(request.method, path)
        if target.operation != "predict":
            return to_quart(_tell(plane, target))
        body = await read_body(plane, target.model, target.version, max_body_bytes, TENSORFLOW_REST)
        return to_quart(await answer_predict(plane, target.model, target.version, body))

    return routes


def _tell(plane: DataPlane, target: Target) -> Answer:
    if target.operation == "status":
        return json_answer(status_document(plane.model_status(target.model, int(target.version or 0), TENSORFLOW_REST)))
    known = plane.model_metadata(target.model, target.version, TENSORFLOW_REST)
    asked = target.version.lstrip("0")
    return json_answer(metadata_document(known, asked or known.versions[-1]))
