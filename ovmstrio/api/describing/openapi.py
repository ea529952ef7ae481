"""The document of all calls (OpenAPI 3.1), made of what is loaded at the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ovmstrio.api.describing.examples import generate_example, infer_example, input_notes
from ovmstrio.api.describing.generation_paths import generation_paths
from ovmstrio.config.specs import HandlerSpec, OpPipelineSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.runtimes.kind import Takes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["openapi_document"]

_OPENAPI: Final = "3.1.0"
_ERROR: Final = {"type": "object", "properties": {"error": {"type": "string"}}}
_TENSOR: Final = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "data": {"type": "array"},
        "parameters": {"type": "object"},
    },
}
_INFER: Final = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": {"type": "object"}},
        "parameters": {"type": "object"},
    },
}
_HANDLE: Final = "handle_"
_OBJECT: Final = {"type": "object"}
_TOLD: Final = (
    ("/v2/health/live", "Whether the server can be asked"),
    ("/v2/health/ready", "Whether all that is configured can be called; if not, why"),
    ("/v2", "Name and version of the server"),
    ("/v1/config", "Every version of everything, with its state"),
    ("/metrics", "Figures for scrapers"),
)


def openapi_document(plane: DataPlane, version: str) -> dict[str, Any]:
    """Give the paths of the server, and of all that can be called now with an example each.

    Args:
        plane: what is served.
        version: of the server.
    """
    paths: dict[str, Any] = {path: {"get": _asked(summary, "server")} for path, summary in _TOLD}
    for path, names, example in generation_paths(_loaded(plane), plane):
        paths["/v3/models"] = {"get": _asked("What is served, as OpenAI's clients list it", "server")}
        paths[path] = {"post": _called("OpenAI's API", names[0], _OBJECT, example, f"models: {', '.join(names)}")}
    for name, service in _loaded(plane):
        paths |= _paths_of(name, service, plane)
    return {
        "openapi": _OPENAPI,
        "info": {"title": plane.server_name, "version": version, "summary": "What is loaded, and how it is called"},
        "paths": paths,
    }


def _loaded(plane: DataPlane) -> Iterator[tuple[str, Any]]:
    # A name with a slash in it is in no path.
    for name in (each for each in plane.statuses() if "/" not in each):
        try:
            yield name, plane.registry.peek(name, "")
        except ServerError:
            # Not loaded, or not yet: what cannot be called has no path.
            continue


def _paths_of(name: str, service: Any, plane: DataPlane) -> dict[str, Any]:
    known: ServableMetadata = service.metadata
    kind = plane.registry.kind_of(name)
    takes = plane.registry.kinds[kind].takes
    quoted = quote(name, safe="")
    base = f"/v2/models/{quoted}"
    paths: dict[str, Any] = {base: {"get": _asked(f"{kind} {name}: inputs and outputs", name)}}
    if kind == OpPipelineSpec.kind:
        example = {"key": ["x"], "value": ["text"]}
        paths[f"/{quoted}/prediction"] = {"post": _called(f"{kind} {name}: texts by key", name, _OBJECT, example)}
    elif kind == HandlerSpec.kind:
        paths |= _handler_paths(name, f"/{quoted}", service)
    elif Takes.GENERATION in takes and Takes.TENSORS not in takes:
        return paths
    elif Takes.TENSORS not in takes:
        paths[f"/{quoted}"] = {"post": _called(f"{kind} {name}: a body of its own", name, {}, {})}
    else:
        notes = "; ".join(input_notes(known))
        example = infer_example(known)
        paths[f"{base}/infer"] = {"post": _called(f"{kind} {name}: KServe's infer", name, _INFER, example, notes)}
        simple = generate_example(known)
        summary = f"{kind} {name}: flat JSON"
        paths[f"{base}/generate"] = {"post": _called(summary, name, _OBJECT, simple, notes)}
        if Takes.STREAMS in takes:
            streamed = _called(f"{kind} {name}: server-sent events", name, _OBJECT, simple, notes)
            paths[f"{base}/generate_stream"] = {"post": streamed}
    return paths


def _handler_paths(name: str, path: str, service: Any) -> dict[str, Any]:
    """Give the path of a handler with the verbs that it has methods for; one with a gRPC service has none."""
    if service.grpc is not None:
        return {}
    verbs = [each.removeprefix(_HANDLE) for each in service.handler.methods if each.startswith(_HANDLE)]
    summary = f"{HandlerSpec.kind} {name}: a body of its own"
    return {path: {verb: _asked(summary, name) if verb == "get" else _called(summary, name, {}, {}) for verb in verbs}}


def _asked(summary: str, tag: str) -> dict[str, Any]:
    return {"summary": summary, "tags": [tag], "responses": _responses()}


def _called(
    summary: str, tag: str, schema: Mapping[str, Any], example: Mapping[str, Any], description: str = ""
) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {
        "summary": summary,
        "description": description,
        "tags": [tag],
        "requestBody": {"required": True, "content": content},
        "responses": _responses(),
    }


def _responses() -> dict[str, Any]:
    refused = {"description": "why not", "content": {"application/json": {"schema": _ERROR}}}
    return {"200": {"description": "the answer"}, "default": refused}
