"""Paths of OpenAI's API that nothing answers, as those of images, and what is no path of the API at all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ovmstrio.api.openai.payload_paths import answer_payload
from ovmstrio.core.errors import InvalidField, MethodNotAllowed, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.api.openai.api import OpenAIApi
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.wire.http.router import Rule

__all__ = ["media_rules", "unknown_path_rules"]

_NO_IMAGES: Final = "this server makes no images"
_REFUSED: Final = {
    "/images/generations": _NO_IMAGES,
    "/images/edits": _NO_IMAGES,
    "/images/variations": _NO_IMAGES,
}


def media_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules of images, which no models make; a graph that takes whole requests may."""

    async def refuse(request: HttpRequest) -> HttpAnswer:
        path = next(path for path in _REFUSED if request.path.endswith(path))
        answered = await answer_payload(api, request, path.removeprefix("/"))
        if answered is not None:
            return answered
        raise InvalidField(f"{request.path}: {_REFUSED[path]}", code="unsupported")

    return [rule for path in _REFUSED for rule in api.rules(path, "POST", refuse, has_tasks=True)]


def unknown_path_rules(api: OpenAIApi, known: Sequence[Rule]) -> list[Rule]:
    """Make the rules of all other paths below ``/v3``, which services may answer.

    Those below ``/v1`` are other APIs' as well.

    ``known`` are the rules that come before.
    """

    async def answer(request: HttpRequest, path: str) -> HttpAnswer:
        asked = f"{request.method} {request.path}"
        methods = {method for rule in known if rule.pattern.fullmatch(request.path) for method in rule.methods}
        if methods:
            raise MethodNotAllowed(f"{asked}: use {' or '.join(sorted(methods - {'HEAD'}))}")
        answered = await answer_payload(api, request, path.removeprefix("v1/"))
        if answered is not None:
            return answered
        raise NotFound(f"{asked}: there is no {path!r:.80} in this API; /openapi.json has all paths")

    made = partial(api.rules, "/<path:path>", view=answer, has_tasks=True, prefixes=("/v3",))
    return [rule for method in ("GET", "POST") for rule in made(method=method)]
