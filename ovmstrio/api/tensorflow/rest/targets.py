"""The paths below ``/v1/models``: which servable they name, and what of it.

A path holds the version, a label (which names the default version) or neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from ovmstrio.api.kserve.rest.infer_route import check_version
from ovmstrio.api.refusals import INVALID_URL, UNSUPPORTED_METHOD
from ovmstrio.core.errors import InvalidRequest, MethodNotAllowed, NotFound

__all__ = ["Operation", "Target", "read_target"]

Operation = Literal["predict", "status", "metadata"]

NO_RESOURCE: Final = "Requested REST resource not found"

_SERVABLE: Final = r"(?P<model>[^/]+?)(?:/versions/(?P<version>[0-9]+)|/labels/[^/:]+)?"
_CALL: Final = re.compile(rf"{_SERVABLE}:(?P<verb>predict|classify|regress)")
_QUESTION: Final = re.compile(rf"{_SERVABLE}(?P<metadata>/metadata)?/?")


@dataclass(frozen=True, slots=True)
class Target:
    """What a path asks for; ``version`` is empty for the default one."""

    operation: Operation
    model: str
    version: str


def read_target(method: str, path: str) -> Target:
    """Read what stands behind ``/v1/models/``.

    Raises:
        InvalidRequest: it is no path of this API.
        MethodNotAllowed: it is one, for another method.
        NotFound: it is an operation that OpenVINO models do not have, or a version larger than any can be.
    """
    match, wanted = _CALL.fullmatch(path), "POST"
    if match is None:
        match, wanted = _QUESTION.fullmatch(path), "GET"
    if match is None:
        raise InvalidRequest(f"{INVALID_URL} - {method} /v1/models/{path}")
    if (method == "POST") != (wanted == "POST"):
        raise MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {method} /v1/models/{path}; use {wanted}")
    operation = _operation(match.groupdict())
    return Target(operation, match["model"], check_version(match["version"] or ""))


def _operation(found: dict[str, str | None]) -> Operation:
    verb = found.get("verb")
    if verb is None:
        return "metadata" if found["metadata"] else "status"
    if verb != "predict":
        raise NotFound(f"{NO_RESOURCE} - {verb} is not supported; use predict")
    return "predict"
