"""Paths of OpenAI's API that nothing answers: those of images, and what is no path of the API at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidField, MethodNotAllowed, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.api.openai.api import OpenAIApi
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.wire.http.router import Rule

__all__ = ["image_rules", "unknown_path_rules"]

_IMAGES: Final = ("/images/generations", "/images/edits", "/images/variations")


def image_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rules of images, which no service makes."""

    async def refuse(request: HttpRequest) -> HttpAnswer:
        raise InvalidField(f"{request.path}: this server makes no images", code="unsupported")

    return [rule for path in _IMAGES for rule in api.rules(path, "POST", refuse)]


def unknown_path_rules(api: OpenAIApi, known: Sequence[Rule]) -> list[Rule]:
    """Make the rules of all other paths below ``/v3``; those below ``/v1`` are other APIs' as well.

    ``known`` are the rules that come before.
    """

    async def refuse(request: HttpRequest, path: str) -> HttpAnswer:
        asked = f"{request.method} {request.path}"
        methods = {method for rule in known if rule.pattern.fullmatch(request.path) for method in rule.methods}
        if methods:
            raise MethodNotAllowed(f"{asked}: use {' or '.join(sorted(methods - {'HEAD'}))}")
        raise NotFound(f"{asked}: there is no {path!r:.80} in this API; /openapi.json has all paths")

    return [rule for method in ("GET", "POST") for rule in api.rules("/<path:path>", method, refuse, prefixes=("/v3",))]
