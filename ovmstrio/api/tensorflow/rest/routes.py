"""TensorFlow Serving's paths: predict, status and metadata of what is below ``/v1/models``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.bodies import body_of_call
from ovmstrio.api.doors import MODEL_MISSING, TENSORFLOW_REST
from ovmstrio.api.status_document import status_document
from ovmstrio.api.tensorflow.rest.metadata_document import metadata_document
from ovmstrio.api.tensorflow.rest.predict_route import answer_predict
from ovmstrio.api.tensorflow.rest.targets import read_target
from ovmstrio.core.errors import NotFound
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.api.tensorflow.rest.targets import Target
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.router import Rule

__all__ = ["tensorflow_rules"]


def tensorflow_rules(plane: DataPlane, max_body_bytes: int) -> list[Rule]:
    """Make the rules over one data plane.

    Which operation a path means is decided here but for the usual ones, because a colon and a slash part it, and
    because OVMS answers a wrong method even where the servable does not exist.
    """

    async def no_name(_: HttpRequest) -> HttpAnswer:
        raise NotFound(MODEL_MISSING)

    async def predict(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        body = body_of_call(plane, request, model, version, limit=max_body_bytes, door=TENSORFLOW_REST)
        return await answer_predict(plane, model, version, body)

    async def answer(request: HttpRequest, path: str) -> HttpAnswer:
        target = read_target(request.method, path)
        if target.operation != "predict":
            return _tell(plane, target)
        return await predict(request, target.model, target.version)

    return [
        rule("/v1/models/<model>:predict", "POST", predict, is_hot=True),
        rule("/v1/models/<model>/versions/<number:version>:predict", "POST", predict, is_hot=True),
        rule("/v1/models", "GET", no_name),
        rule("/v1/models/<path:path>", "GET", answer),
        rule("/v1/models/<path:path>", "POST", answer),
    ]


def _tell(plane: DataPlane, target: Target) -> HttpAnswer:
    if target.operation == "status":
        return json_answer(status_document(plane.model_status(target.model, int(target.version or 0), TENSORFLOW_REST)))
    known = plane.model_metadata(target.model, target.version, TENSORFLOW_REST)
    asked = target.version.lstrip("0")
    return json_answer(metadata_document(known, asked or known.versions[-1]))
