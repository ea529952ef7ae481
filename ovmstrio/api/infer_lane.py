"""Inferences in the fast lane: ``/v2/models/{m}/infer`` of KServe, ``/v1/models/{m}:predict`` of TensorFlow Serving."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from ovmstrio.api.doors import KSERVE_REST, TENSORFLOW_REST
from ovmstrio.api.kserve.rest.infer_route import answer_infer
from ovmstrio.api.tensorflow.rest.predict_route import answer_predict
from ovmstrio.core.events import Door

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.answers import Answer
    from ovmstrio.wire.http.lane_head import Head

__all__ = ["InferRoutes", "InferTarget", "read_infer"]

_TARGET: Final = re.compile(r"/(v[12])/models/([^/?]+?)(?:/versions/([0-9]{1,19}))?(/infer|:predict)")
_DOORS: Final[Mapping[tuple[str, str], Door]] = {("v2", "/infer"): KSERVE_REST, ("v1", ":predict"): TENSORFLOW_REST}


class InferTarget(NamedTuple):
    """What an inference is asked of, and through which door."""

    door: Door
    model: str
    version: str


@lru_cache(maxsize=1024)
def _read_target(target: str) -> InferTarget | None:
    """Read the target of an inference; None for any other."""
    match = _TARGET.fullmatch(target)
    door = _DOORS.get((match[1], match[4])) if match is not None else None
    if match is None or door is None or not target.isascii():
        return None
    try:
        model = unquote(match[2], errors="strict")
    except UnicodeDecodeError:
        return None
    return None if "/" in model or ".." in model else InferTarget(door, model, match[3] or "")


def read_infer(head: Head) -> InferTarget | None:
    """Tell what an inference is asked of; None for what is the application's, as requests of another origin's page."""
    target = _read_target(head.target) if head.method == "POST" else None
    return None if head.get("origin") is not None else target


class InferRoutes:
    """The lane's way to the models, pipelines and graphs of a data plane."""

    prefixes: Final = (b"POST /v1/models/", b"POST /v2/models/")

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def route(self, head: Head) -> Callable[[bytes], Awaitable[Answer]] | None:
        """Find what answers a request; None for one that is the application's."""
        target = read_infer(head)
        if target is None:
            return None
        return partial(self._infer, target, head.get("inference-header-content-length"))

    async def _infer(self, target: InferTarget, json_length: str | None, body: bytes) -> Answer:
        if target.door is KSERVE_REST:
            return await answer_infer(self._plane, target.model, target.version, body, json_length)
        return await answer_predict(self._plane, target.model, target.version, body)
