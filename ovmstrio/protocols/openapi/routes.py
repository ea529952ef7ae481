"""API documentation: OpenAPI 3.1 document of the loaded services, and its routes."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import quote

from ovmstrio.config.specs import HandlerSpec, OpPipelineSpec
from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import ServerError
from ovmstrio.core.generation import Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.tensor import INVALID
from ovmstrio.protocols.kserve.extensions import server_version
from ovmstrio.serving.kind import CallType
from ovmstrio.transport.http.responses import json_response
from ovmstrio.transport.http.router import rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.http_messages import Headers, HttpRequest
    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

# Examples

_MAX_ELEMENTS: Final = 1024  # Maximum elements of an example
_VALUES: Final[dict[str, Any]] = {"BOOL": False, "BYTES": "text", "INVALID": "text"}
_FLOATS: Final = ("FP", "BF")


_SEQUENCE: Final[dict[str, Any]] = {"sequence_start": True, "sequence_end": True}
"""Single-request sequence, whose id the server chooses."""
_SEQUENCE_NOTE: Final = (
    "a sequence of one request; without sequence_end the sequence continues with the returned sequence_id"
)


def _infer_example(known: ServableMetadata) -> dict[str, Any]:
    """Return a body for KServe's ``infer``: zeros of the smallest valid shape; large inputs have a single value."""
    parameters = {"parameters": _SEQUENCE} if known.has_sequences else {}
    return {**parameters, "inputs": [_input(spec) for spec in known.inputs]}


def _generate_example(known: ServableMetadata) -> dict[str, Any]:
    return {spec.name: _nested(spec) for spec in known.inputs} | (_SEQUENCE if known.has_sequences else {})


def _input_notes(known: ServableMetadata) -> list[str]:
    return [_note(spec) for spec in known.inputs] + ([_SEQUENCE_NOTE] if known.has_sequences else [])


def _note(spec: TensorSpec) -> str:
    if spec.datatype is INVALID:
        return f"{spec.name}: type and shape as the graph node expects"
    count = prod(_sizes(spec))
    filled = f"; fill in {count} values" if count > _MAX_ELEMENTS else ""
    return f"{spec.name}: {spec.datatype.name} {spec.reported_shape}{filled}"


def _input(spec: TensorSpec) -> dict[str, Any]:
    sizes = _sizes(spec)
    count = prod(sizes)
    datatype = "BYTES" if spec.datatype is INVALID else spec.datatype.name
    data = [_value(spec)] * (count if count <= _MAX_ELEMENTS else 1)
    return {"name": spec.name, "shape": sizes, "datatype": datatype, "data": data}


def _nested(spec: TensorSpec) -> Any:
    """Return nested lists of the input's shape, or one value if the shape is too large."""
    value, sizes = _value(spec), _sizes(spec)
    if spec.datatype is INVALID or prod(sizes) > _MAX_ELEMENTS:
        return value
    for size in reversed(sizes):
        value = [value] * size
    return value


def _sizes(spec: TensorSpec) -> list[int]:
    return [1] if spec.datatype is INVALID else [dim.low if dim.is_fixed else max(dim.low, 1) for dim in spec.shape]


def _value(spec: TensorSpec) -> Any:
    name = spec.datatype.name
    return _VALUES.get(name, 0.0 if name.startswith(_FLOATS) else 0)


# Paths of text models

_HELLO: Final = "Say hello."
_EXAMPLES: Final[Mapping[Task, Mapping[str, Mapping[str, Any]]]] = {
    Task.TEXT_GENERATION: {
        "/v3/chat/completions": {"messages": [{"role": "user", "content": _HELLO}], "max_tokens": 16},
        "/v3/completions": {"prompt": _HELLO, "max_tokens": 16},
        "/v3/responses": {"input": _HELLO, "max_output_tokens": 16},
        "/v1/messages": {"messages": [{"role": "user", "content": _HELLO}], "max_tokens": 16},
        "/api/chat": {"messages": [{"role": "user", "content": _HELLO}], "options": {"num_predict": 16}},
        "/api/generate": {"prompt": _HELLO, "options": {"num_predict": 16}},
    },
    Task.EMBEDDINGS: {path: {"input": [_HELLO]} for path in ("/v3/embeddings", "/v3/pooling", "/api/embed")},
    Task.TEXT_TO_SPEECH: {"/v3/audio/speech": {"input": _HELLO}},
    Task.IMAGE_GENERATION: {"/v3/images/generations": {"prompt": "a cat"}},
    Task.RERANK: {
        "/v3/rerank": {"query": _HELLO, "documents": ["hello", "goodbye"]},
        "/v3/score": {"text_1": _HELLO, "text_2": ["hello", "goodbye"]},
    },
}


class _GenerationPath(NamedTuple):
    path: str
    summary: str
    models: tuple[str, ...]
    example: Mapping[str, Any]


def _generation_paths(loaded: Iterable[tuple[str, object]], plane: DataPlane) -> Iterator[_GenerationPath]:
    """Yield the paths of services that only generate; whether a graph supports chat, only a call shows."""
    named: dict[Task, list[str]] = {}
    for name, service in loaded:
        call_types = plane.registry.call_types(name)
        if CallType.GENERATION in call_types and CallType.TENSORS not in call_types:
            for task in cast("GenerativeService", service).tasks:
                named.setdefault(task, []).append(name)
    for task, names in named.items():
        for path, example in _EXAMPLES.get(task, {}).items():
            api = "Ollama" if path.startswith("/api") else "Anthropic" if path.endswith("/messages") else "OpenAI"
            yield _GenerationPath(path, f"{api} API", tuple(names), {"model": names[0], **example})


# Document

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
_SERVER_PATHS: Final = (
    ("/v2/health/live", "Liveness"),
    ("/v2/health/ready", "Readiness, with the reason if not ready"),
    ("/v2", "Server name and version"),
    ("/v1/config", "State of all versions of all services"),
    ("/metrics", "Metrics"),
)


def _openapi_document(plane: DataPlane, version: str) -> dict[str, Any]:
    """Return the document: the server's paths, and every callable service with an example."""
    paths: dict[str, Any] = {path: {"get": _get_operation(summary, "server")} for path, summary in _SERVER_PATHS}
    for path, summary, names, example in _generation_paths(_loaded(plane), plane):
        paths["/v3/models"] = {"get": _get_operation("Models", "server")}
        paths[path] = {"post": _post_operation(summary, names[0], _OBJECT, example, f"models: {', '.join(names)}")}
    for name, service in _loaded(plane):
        paths |= _paths_of(name, service, plane)
    return {
        "openapi": _OPENAPI,
        "info": {"title": plane.server_name, "version": version, "summary": "Loaded services and their calls"},
        "paths": paths,
    }


def _loaded(plane: DataPlane) -> Iterator[tuple[str, Any]]:
    # Names with a slash have no path.
    for name in (each for each in plane.statuses() if "/" not in each):
        try:
            yield name, plane.registry.peek(name, "")
        except ServerError:
            continue


def _paths_of(name: str, service: Any, plane: DataPlane) -> dict[str, Any]:
    known: ServableMetadata = service.metadata
    kind = plane.registry.kind_of(name)
    call_types = plane.registry.kinds[kind].call_types
    quoted = quote(name, safe="")
    base = f"/v2/models/{quoted}"
    paths: dict[str, Any] = {base: {"get": _get_operation(f"{kind} {name}: inputs and outputs", name)}}
    if kind == OpPipelineSpec.kind:
        example = {"key": ["x"], "value": ["text"]}
        paths[f"/{quoted}/prediction"] = {
            "post": _post_operation(f"{kind} {name}: text by key", name, _OBJECT, example)
        }
    elif kind == HandlerSpec.kind:
        paths |= _handler_paths(name, f"/{quoted}", service)
    elif CallType.GENERATION in call_types and CallType.TENSORS not in call_types:
        return paths
    elif CallType.TENSORS not in call_types:
        paths[f"/{quoted}"] = {"post": _post_operation(f"{kind} {name}: body defined by the service", name, {}, {})}
    else:
        notes = "; ".join(_input_notes(known))
        example = _infer_example(known)
        paths[f"{base}/infer"] = {"post": _post_operation(f"{kind} {name}: KServe infer", name, _INFER, example, notes)}
        simple = _generate_example(known)
        summary = f"{kind} {name}: flat JSON"
        paths[f"{base}/generate"] = {"post": _post_operation(summary, name, _OBJECT, simple, notes)}
        if CallType.STREAMS in call_types:
            streamed = _post_operation(f"{kind} {name}: server-sent events", name, _OBJECT, simple, notes)
            paths[f"{base}/generate_stream"] = {"post": streamed}
    return paths


def _handler_paths(name: str, path: str, service: Any) -> dict[str, Any]:
    """Return the path of a handler with the HTTP methods that it implements; none for gRPC handlers."""
    if service.grpc is not None:
        return {}
    verbs = [each.removeprefix(_HANDLE) for each in service.handler.methods if each.startswith(_HANDLE)]
    summary = f"{HandlerSpec.kind} {name}: body defined by the handler"
    return {
        path: {
            verb: _get_operation(summary, name) if verb == "get" else _post_operation(summary, name, {}, {})
            for verb in verbs
        }
    }


def _get_operation(summary: str, tag: str) -> dict[str, Any]:
    return {"summary": summary, "tags": [tag], "responses": _responses()}


def _post_operation(
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
    error = {"description": "error", "content": {"application/json": {"schema": _ERROR}}}
    return {"200": {"description": "response"}, "default": error}


# Routes

_DOCUMENT: Final = "/openapi.json"
_PAGE: Final = "/v2/docs"
_CONSOLE: Final = "/console"
_CONSOLE_LINK: Final = f' · <a href="{_CONSOLE}">Console</a>'.encode()
_PAGE_HEADERS: Final[Headers] = (
    ("content-type", "text/html; charset=utf-8"),
    # The page is self-contained: nothing is loaded from other hosts.
    (
        "content-security-policy",
        (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
            "base-uri 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
)


def documentation_rules(
    plane: DataPlane, *, has_root: bool, has_console: Callable[[HttpRequest], bool] = lambda _: False
) -> list[Rule]:
    """Return the routes.

    Args:
        plane: the data plane.
        has_root: whether a service owns ``/``.
        has_console: returns whether the client of a request may open the console.
    """

    async def document(_: HttpRequest) -> HttpAnswer:
        return json_response(_openapi_document(plane, server_version()))

    async def page(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, _PAGE_HEADERS, _page(has_console=has_console(request)))

    async def here(request: HttpRequest) -> HttpAnswer:
        if "text/html" in (request.header("accept") or ""):
            # The answer depends on the client.
            headers = (("location", _CONSOLE if has_console(request) else _PAGE), ("cache-control", "no-store"))
            return HttpAnswer(302, headers)
        return json_response(_overview(plane))

    rules = [rule(_DOCUMENT, "GET", document, need=Permission.READ), rule(_PAGE, "GET", page, need=Permission.READ)]
    return rules if has_root else [*rules, rule("/", "GET", here, need=Permission.READ)]


@cache
def _page(*, has_console: bool) -> bytes:
    content = files("ovmstrio.protocols.openapi").joinpath("page.html").read_bytes()
    return content.replace(b"<!-- console -->", _CONSOLE_LINK if has_console else b"")


def _overview(plane: DataPlane) -> dict[str, Any]:
    readiness = plane.readiness()
    services = [
        {
            "name": each.name,
            "kind": plane.registry.kind_of(each.name),
            "version": each.version,
            "state": each.state.name,
        }
        for statuses in plane.statuses().values()
        for each in statuses
    ]
    further = {"docs": _PAGE, "openapi": _DOCUMENT, "health": "/v2/health/ready", "states": "/v1/config"}
    if plane.render_metrics() is not None:
        further["metrics"] = "/metrics"
    state = {"ready": readiness.ready} | ({} if readiness.ready else {"reason": readiness.reason})
    return {"name": plane.server_name, "version": server_version(), **state, "services": services, "next": further}
