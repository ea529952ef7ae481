"""The document of all calls (OpenAPI 3.1), made of what is loaded at the moment."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import quote

from ovmstrio.config.specs import HandlerSpec, OpPipelineSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.core.generation import Task
from ovmstrio.core.tensor import INVALID
from ovmstrio.serving.kind import Takes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.core.tensor import Dim, TensorSpec
    from ovmstrio.serving.data_plane import DataPlane

__all__ = ["GenerationPath", "generate_example", "generation_paths", "infer_example", "input_notes", "openapi_document"]

# ----------------------------------------------------------------------
# Requests that may be sent as they are: for each servable one, made of what its metadata tells
# ----------------------------------------------------------------------

_MOST_ELEMENTS: Final = 1024
"""An example with more would be read by nobody."""
_VALUES: Final[dict[str, Any]] = {"BOOL": False, "BYTES": "text", "INVALID": "text"}
_FLOATS: Final = ("FP", "BF")


_SEQUENCE: Final[dict[str, Any]] = {"sequence_start": True, "sequence_end": True}
"""A whole sequence, whose id is the server's to choose."""
_SEQUENCE_NOTE: Final = (
    "a sequence of one request; without sequence_end it goes on with those that have its sequence_id, which is answered"
)


def infer_example(known: ServableMetadata) -> dict[str, Any]:
    """Give a body for KServe's ``infer``: zeros of the smallest shape that fits.

    Inputs of more than 1024 elements have one value for all, which has to be filled in.
    """
    parameters = {"parameters": _SEQUENCE} if known.has_sequences else {}
    return {**parameters, "inputs": [_input(spec) for spec in known.inputs]}


def generate_example(known: ServableMetadata) -> dict[str, Any]:
    """Give a body for ``generate``."""
    return {spec.name: _nested(spec) for spec in known.inputs} | (_SEQUENCE if known.has_sequences else {})


def input_notes(known: ServableMetadata) -> list[str]:
    """Say what each input takes."""
    return [_note(spec) for spec in known.inputs] + ([_SEQUENCE_NOTE] if known.has_sequences else [])


def _note(spec: TensorSpec) -> str:
    if spec.datatype is INVALID:
        return f"{spec.name}: of the type and shape that its node expects"
    count = prod(_sizes(spec))
    filled = f"; fill in {count} values" if count > _MOST_ELEMENTS else ""
    return f"{spec.name}: {spec.datatype.name} {spec.reported_shape}{filled}"


def _input(spec: TensorSpec) -> dict[str, Any]:
    sizes = _sizes(spec)
    count = prod(sizes)
    datatype = "BYTES" if spec.datatype is INVALID else spec.datatype.name
    data = [_value(spec)] * (count if count <= _MOST_ELEMENTS else 1)
    return {"name": spec.name, "shape": sizes, "datatype": datatype, "data": data}


def _nested(spec: TensorSpec) -> Any:
    """Give lists of the input's shape, or one value where that would be too many."""
    value, sizes = _value(spec), _sizes(spec)
    if spec.datatype is INVALID or prod(sizes) > _MOST_ELEMENTS:
        return value
    for size in reversed(sizes):
        value = [value] * size
    return value


def _sizes(spec: TensorSpec) -> list[int]:
    return [1] if spec.datatype is INVALID else [_size(dim) for dim in spec.shape]


def _size(dim: Dim) -> int:
    return dim.low if dim.is_fixed else max(dim.low, 1)


def _value(spec: TensorSpec) -> Any:
    name = spec.datatype.name
    return _VALUES.get(name, 0.0 if name.startswith(_FLOATS) else 0)


# ----------------------------------------------------------------------
# Paths of OpenAI's API in the document of all calls: one each for all models that answer it
# ----------------------------------------------------------------------

_HELLO: Final = "Say hello."
_EXAMPLES: Final[Mapping[Task, Mapping[str, Mapping[str, Any]]]] = {
    Task.TEXT_GENERATION: {
        "/chat/completions": {"messages": [{"role": "user", "content": _HELLO}], "max_tokens": 16},
        "/completions": {"prompt": _HELLO, "max_tokens": 16},
        "/responses": {"input": _HELLO, "max_output_tokens": 16},
    },
    Task.EMBEDDINGS: {"/embeddings": {"input": [_HELLO]}},
    Task.TEXT_TO_SPEECH: {"/audio/speech": {"input": _HELLO}},
    Task.RERANK: {"/rerank": {"query": _HELLO, "documents": ["hello", "goodbye"]}},
}


class GenerationPath(NamedTuple):
    """A path, the models that answer it, and a body for the first of them."""

    path: str
    models: tuple[str, ...]
    example: Mapping[str, Any]


def generation_paths(loaded: Iterable[tuple[str, object]], plane: DataPlane) -> Iterator[GenerationPath]:
    """Give the paths of services that are loaded and do nothing else.

    Graphs may answer chats, too, but only a call shows whether what they give is text; they have paths of their own.
    """
    named: dict[Task, list[str]] = {}
    for name, service in loaded:
        takes = plane.registry.takes_of(name)
        if Takes.GENERATION in takes and Takes.TENSORS not in takes:
            for task in cast("GenerativeService", service).tasks:
                named.setdefault(task, []).append(name)
    for task, names in named.items():
        for path, example in _EXAMPLES.get(task, {}).items():
            yield GenerationPath(f"/v3{path}", tuple(names), {"model": names[0], **example})


# ----------------------------------------------------------------------
# The document of all calls (OpenAPI 3.1), made of what is loaded at the moment
# ----------------------------------------------------------------------

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
