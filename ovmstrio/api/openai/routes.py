"""The one list of endpoints of OpenAI's API, each a module of its own.

::

    path ─> endpoint ─> body (JSON or multipart) ─> service by its model ─> answer, or events

An endpoint is a function that makes its rules over an :class:`OpenAIApi`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.api.openai.api import OpenAIApi
from ovmstrio.api.openai.audio.speech import speech_rules
from ovmstrio.api.openai.audio.transcriptions import transcription_rules
from ovmstrio.api.openai.chat import chat_rules
from ovmstrio.api.openai.completions import completion_rules
from ovmstrio.api.openai.embeddings import embedding_rules
from ovmstrio.api.openai.error_forms import FORMS
from ovmstrio.api.openai.health import openai_health_rules
from ovmstrio.api.openai.models import model_rules
from ovmstrio.api.openai.refused_paths import media_rules, unknown_path_rules
from ovmstrio.api.openai.rerank import rerank_rules
from ovmstrio.api.openai.responses.endpoint import response_rules
from ovmstrio.api.openai.tokenize import tokenize_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.router import Rule

__all__ = ["openai_rules"]

_ENDPOINTS: Final[tuple[Callable[[OpenAIApi], list[Rule]], ...]] = (
    chat_rules,
    completion_rules,
    embedding_rules,
    rerank_rules,
    tokenize_rules,
    model_rules,
    openai_health_rules,
    response_rules,
    transcription_rules,
    speech_rules,
    media_rules,
)


def openai_rules(plane: DataPlane, max_body_bytes: int, errors: str = "openai") -> list[Rule]:
    """Make the rules over one data plane.

    Args:
        plane: what is served.
        max_body_bytes: of what a body may have once its encoding is undone.
        errors: the form of errors, a key of ``FORMS``.
    """
    api = OpenAIApi(plane, max_body_bytes, FORMS[errors])
    rules = [rule for make in _ENDPOINTS for rule in make(api)]
    return [*rules, *unknown_path_rules(api, rules)]
