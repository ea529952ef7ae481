"""OpenAI endpoint ``/models``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ServerError
from ovmstrio.core.generation import GenerationLimits, Task
from ovmstrio.protocols.openai.api import tasks_of
from ovmstrio.transport.http.responses import json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

_OWNER: Final = "OVMS"
STARTED: Final = int(time.time())


def model_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes; below ``/v1`` a model's path is TensorFlow Serving's, whose document has both APIs' fields."""

    async def every(_: HttpRequest) -> HttpAnswer:
        # Text models come first, for clients that use the first model.
        names = sorted(loaded_names(api.plane), key=lambda name: (_rank(tasks_of(api.plane, name)), name))
        return json_response({"object": "list", "data": [model_document(api.plane, name) for name in names]})

    async def one(_: HttpRequest, name: str) -> HttpAnswer:
        if name not in loaded_names(api.plane):
            raise api.missing(name)
        return json_response(model_document(api.plane, name))

    return [
        *api.rules("/models", "GET", every),
        # Names may contain slashes, as on model hubs.
        *api.rules("/models/<path:name>", "GET", one, prefixes=("/v3/v1", "/v3")),
    ]


def model_document(plane: DataPlane, name: str) -> dict[str, Any]:
    """Return the document of a loaded service; ``created`` is the server's start time.

    As in vLLM, a text model has its token limit, and one that generates text has a ``parent``: the model that it is a
    LoRA adapter of, or null.
    """
    document = {"id": name, "object": "model", "created": STARTED, "owned_by": _OWNER}
    limits = getattr(plane.registry.peek(name), "limits", None) if tasks_of(plane, name) else None
    if isinstance(limits, GenerationLimits) and limits.context_length is not None:
        document["max_model_len"] = limits.context_length
    parent = parent_of(plane, name)
    return document if parent is None else {**document, "parent": parent or None}


def parent_of(plane: DataPlane, name: str) -> str | None:
    """Return the parent of a loaded adapter, an empty text for other language models, None for other services."""
    try:
        return plane.registry.peek(name).parent  # type: ignore[attr-defined,no-any-return]
    except (AttributeError, ServerError):
        return None


def parents(plane: DataPlane) -> list[str]:
    """Return the loaded language models without adapter."""
    return [name for name in sorted(loaded_names(plane)) if parent_of(plane, name) == ""]


def openai_status_fields(plane: DataPlane, name: str) -> Mapping[str, Any]:
    """Return the OpenAI fields to add to TensorFlow Serving's model status; empty for other models."""
    return model_document(plane, name) if tasks_of(plane, name) else {}


def loaded_names(plane: DataPlane) -> list[str]:
    """Return the names of the loaded services that the caller may see."""
    return [name for name in plane.statuses() if plane.registry.available_versions(name)]


def _rank(tasks: frozenset[Task]) -> int:
    """Return the sort key: text generation, other OpenAI tasks, other services."""
    return 0 if Task.TEXT_GENERATION in tasks else 1 if tasks else 2
