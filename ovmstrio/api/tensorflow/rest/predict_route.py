"""The predict call itself: look up, read the body for what was found, infer, render."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from ovmstrio.api.doors import MODEL_MISSING, TENSORFLOW_REST
from ovmstrio.api.kserve.rest.infer_route import check_version
from ovmstrio.api.tensorflow.rest.predict_answer import render_predict_answer
from ovmstrio.api.tensorflow.rest.predict_request import read_predict_body
from ovmstrio.core.errors import NotFound, ServerError
from ovmstrio.core.request import InferRequest
from ovmstrio.wire.http.answers import error_answer, failure_answer

if TYPE_CHECKING:
    from ovmstrio.core.request import InferResponse
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.answers import Answer

__all__ = ["answer_predict"]

log = structlog.get_logger(__name__)


async def answer_predict(plane: DataPlane, model: str, version: str, body: bytes) -> Answer:
    """Read the body, infer, and render the answer, or the refusal.

    Raises: nothing but cancellation; every failure becomes an answer.

    Ownership: none beyond the call; ``body`` is not kept.
    Cancellation: while the servable is being loaded, and at any checkpoint of its.
    """
    try:
        return await _predict(plane, model, check_version(version), body)
    except ServerError as error:
        return error_answer(error)
    except Exception:  # the border of one request
        log.exception("request failed", model=model, version=version)
        return failure_answer()


async def _predict(plane: DataPlane, model: str, version: str, body: bytes) -> Answer:
    """Look for the servable before looking at the body, as OVMS does."""
    described = await plane.describe(model, version, TENSORFLOW_REST)
    if described.has_streams:
        # JSON has no datatypes, and graphs tell none either.
        raise NotFound(MODEL_MISSING)
    try:
        read = read_predict_body(body, described.inputs)
    except ServerError as error:
        plane.count_unparsed(model, version, error, TENSORFLOW_REST, len(body))
        raise

    def render(response: InferResponse) -> tuple[Answer, int]:
        answer = render_predict_answer(response, by_rows=read.by_rows)
        return answer, len(answer.body)

    asked = InferRequest(model, version, inputs=read.inputs, received=len(body))
    return await plane.infer(asked, TENSORFLOW_REST, render)
