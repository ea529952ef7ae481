"""Ollama's endpoints about models: ``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.generation import GenerationLimits, Task
from ovmstrio.protocols.ollama.api import resolve_name
from ovmstrio.protocols.openai.api import read_document, tasks_of
from ovmstrio.protocols.openai.fields import Fields
from ovmstrio.protocols.openai.known_fields import KnownFields, Refused
from ovmstrio.protocols.openai.models import STARTED, loaded_names
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.transport.http.responses import json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_VERSION: Final = "0.12.0"
"""Version of Ollama whose API this is; some clients refuse old ones."""
_FOREVER: Final = "2318-01-01T00:00:00Z"
"""Time at which a model is unloaded, as far as clients are concerned."""
_STARTED_AT: Final = datetime.fromtimestamp(STARTED, UTC).isoformat().replace("+00:00", "Z")
_CAPABILITIES: Final[Mapping[Task, tuple[str, ...]]] = {
    Task.TEXT_GENERATION: ("completion", "tools"),
    Task.EMBEDDINGS: ("embedding",),
}
SHOW: Final = KnownFields(
    frozenset({"model", "name"}),
    {"verbose": Fields.flag},
    dict.fromkeys(("system", "template", "options"), Refused("the server has no Modelfiles; send it with requests")),
)


def model_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes."""

    async def tags(_: HttpRequest) -> HttpAnswer:
        return json_response({"models": [_summary(api, name) for name in _names(api)]})

    async def loaded(_: HttpRequest) -> HttpAnswer:
        models = [
            {
                **_summary(api, name),
                "expires_at": _FOREVER,
                "size_vram": 0,
                "context_length": _limits(api, name).context_length or 0,
            }
            for name in _names(api)
        ]
        return json_response({"models": models})

    async def show(request: HttpRequest) -> HttpAnswer:
        document = await read_document(await decompressed_body(request, api.max_body_bytes))
        errors = ErrorList()
        fields = Fields(document, errors)
        given = fields.text("model") or fields.text("name")
        if given is None:
            fields.refuse("model", "model is missing", code="missing_required_parameter")
        SHOW.check(fields)
        errors.raise_if_any()
        name = resolve_name(api, given or "")
        if name not in _names(api):
            raise api.missing(name)
        return json_response(_description(api, name))

    async def version(_: HttpRequest) -> HttpAnswer:
        return json_response({"version": _VERSION})

    return [
        *api.rules("/tags", "GET", tags, prefixes=("/api",)),
        *api.rules("/ps", "GET", loaded, prefixes=("/api",)),
        *api.rules("/show", "POST", show, prefixes=("/api",)),
        *api.rules("/version", "GET", version, prefixes=("/api",)),
    ]


def _names(api: OpenAIApi) -> list[str]:
    """Return the models that generate text or compute embeddings."""
    return sorted(name for name in loaded_names(api.plane) if tasks_of(api.plane, name) & _CAPABILITIES.keys())


def _summary(api: OpenAIApi, name: str) -> dict[str, Any]:
    # The digest identifies the name; the files of a model have no digest of their own.
    digest = sha256(name.encode()).hexdigest()
    head = {"name": name, "model": name, "modified_at": _STARTED_AT, "size": 0, "digest": digest}
    return {**head, "details": _details(api, name)}


def _details(api: OpenAIApi, name: str) -> dict[str, Any]:
    family = _family(api, name)
    return {
        "parent_model": "",
        "format": "openvino",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _description(api: OpenAIApi, name: str) -> dict[str, Any]:
    service: Any = api.plane.registry.peek(name)
    limits, family = _limits(api, name), _family(api, name)
    capabilities = [each for task in tasks_of(api.plane, name) for each in _CAPABILITIES.get(task, ())]
    if getattr(service, "has_reasoning", False):
        capabilities.append("thinking")
    if limits.takes_images:
        capabilities.append("vision")
    info: dict[str, Any] = {"general.architecture": family, "general.basename": name}
    if limits.context_length is not None:
        info[f"{family}.context_length"] = limits.context_length
    return {
        "modelfile": f"FROM {name}",
        "parameters": "",
        "template": getattr(service, "chat_template", ""),
        "details": _details(api, name),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": _STARTED_AT,
    }


def _family(api: OpenAIApi, name: str) -> str:
    architecture: str = getattr(api.plane.registry.peek(name), "architecture", "")
    return architecture.partition("For")[0].lower() or "unknown"


def _limits(api: OpenAIApi, name: str) -> GenerationLimits:
    limits = getattr(api.plane.registry.peek(name), "limits", None)
    return limits if isinstance(limits, GenerationLimits) else GenerationLimits()
