"""The predict call itself: look up, read the body for what was found, infer, render."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.doors import MODEL_MISSING, TENSORFLOW_REST
from ovmstrio.api.kserve.rest.infer_route import check_version
from ovmstrio.api.tensorflow.rest.predict_answer import render_predict_answer
from ovmstrio.api.tensorflow.rest.predict_request import read_predict_body
from ovmstrio.core.errors import NotFound, ServerError
from ovmstrio.core.request import InferRequest

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpAnswer
    from ovmstrio.core.request import InferResponse
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["answer_predict"]


async def answer_predict(plane: DataPlane, model: str, version: str, body: bytes) -> HttpAnswer:
    """Look for the servable before looking at the body, as OVMS does; infer, and render the answer.

    Raises:
        ServerError: the refusal.

    Ownership: none beyond the call; ``body`` is not kept.
    Cancellation: while the servable is being loaded, and at any checkpoint of its.
    """
    check_version(version)
    described = await plane.describe(model, version, TENSORFLOW_REST)
    if described.has_streams:
        # JSON has no datatypes, and graphs tell none either.
        raise NotFound(MODEL_MISSING)
    try:
        read = read_predict_body(body, described.inputs)
    except ServerError as error:
        plane.count_unparsed(model, version, error, TENSORFLOW_REST, len(body))
        raise

    def render(response: InferResponse) -> tuple[HttpAnswer, int]:
        answer = render_predict_answer(response, by_rows=read.by_rows)
        return answer, len(answer.content)

    asked = InferRequest(model, version, inputs=read.inputs, received=len(body))
    return await plane.infer(asked, TENSORFLOW_REST, render)
