"""An inference over REST: read the body, infer, render."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.api.doors import KSERVE_REST, VERSION_MISSING
from ovmstrio.api.kserve.rest.infer_answer import render_infer_answer
from ovmstrio.api.kserve.rest.infer_request import read_infer_request
from ovmstrio.core.errors import InvalidRequest, NotFound, ServerError

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpAnswer
    from ovmstrio.core.request import Buffer, InferResponse
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["answer_infer", "check_version"]

_MAX_VERSION: Final = 2**63 - 1


def check_version(version: str) -> str:
    """Give a version of a path back if it may name one; an empty one is the default.

    Raises:
        InvalidRequest: it is not a whole number.
        NotFound: it is larger than any version can be.
    """
    if version and not (version.isascii() and version.isdigit()):
        raise InvalidRequest(f'Model version must be an integer, got "{version[:40]}"')
    if version and (len(version) > len(str(_MAX_VERSION)) or int(version) > _MAX_VERSION):
        raise NotFound(VERSION_MISSING)
    return version


async def answer_infer(plane: DataPlane, model: str, version: str, body: Buffer, head_length: str | None) -> HttpAnswer:
    """Read the body, infer, and render the answer.

    Raises:
        ServerError: the refusal.

    Ownership: ``body`` must stay unchanged until this returns.
    Cancellation: at any checkpoint of the servable.
    """
    try:
        request = read_infer_request(model, version, body, head_length)
    except ServerError as error:
        plane.count_unparsed(model, version, error, KSERVE_REST, len(body))
        raise
    check_version(version)
    request.received = len(body)

    def render(response: InferResponse) -> tuple[HttpAnswer, int]:
        answer = render_infer_answer(request, response)
        return answer, len(answer.content)

    return await plane.infer(request, KSERVE_REST, render)
