"""``/health``: whether the server is ready, where programs that measure or balance vLLM and llama.cpp look for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.callers import Need
from ovmstrio.core.errors import NotReady
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.api.openai.api import OpenAIApi
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.wire.http.router import Rule

__all__ = ["openai_health_rules"]


def openai_health_rules(api: OpenAIApi) -> list[Rule]:
    """Make the rule, which asks nobody for a key."""

    async def health(_: HttpRequest) -> HttpAnswer:
        readiness = api.plane.readiness()
        if not readiness.ready:
            raise NotReady(f"Server is not ready - {readiness.reason}")
        return json_answer({"status": "ok"})

    return [rule("/health", "GET", health, is_hot=True, need=Need.NOTHING)]
