"""Routing of requests to services and shards, by HTTP path, OpenAI body or the first gRPC message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import orjson

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.grpc_services import CALLS, INFER, MODEL_SPEC, NAME
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.encoding.protobuf_wire import first_string_field
from ovmstrio.models.sequences.requests import owner_index, read_control
from ovmstrio.protocols.kserve.grpc_messages import decode_request
from ovmstrio.protocols.kserve.rest_requests import read_infer_request

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.core.request import InferRequest

# ----------------------------------------------------------------------
# Service
# ----------------------------------------------------------------------

_INGRESS_HINT: Final = 'place all text models in the group "ingress"'


_MODEL_PATH_PREFIXES: Final = ("/v1/models/", "/v2/models/")


_GENERATE_STREAM_SUFFIX: Final = "/generate_stream"


_OPENAI: Final = (
    "/v3/",
    "/v1/chat/",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/audio/",
    "/v1/images/",
    "/v1/messages",
    "/v1/rerank",
    "/v1/tokenize",
    "/v1/v2/rerank",
    "/v2/rerank",
    "/api/chat",
    "/api/generate",
    "/api/embed",
)
"""Path prefixes of the OpenAI, Anthropic and Ollama APIs."""

_DEFAULT_TAG: Final = ":latest"


_MODELS_PATH: Final = "/v1/models"


_V3_PREFIX: Final = "/v3/"


class HttpTarget(NamedTuple):
    """Service of a request (empty for the server itself), and whether the response may be streamed."""

    name: str
    may_stream: bool


def plain_path(request: HttpRequest) -> str:
    """Return the decoded path of a request without doubled and trailing slashes."""
    return unquote(_path_without_double_slashes(request)).rstrip("/") or "/"


def _path_without_double_slashes(request: HttpRequest) -> str:
    return re.sub("//+", "/", request.target.partition("?")[0])


def is_openai(path: str) -> bool:
    """Return whether a path belongs to the OpenAI, Anthropic or Ollama API."""
    return path.startswith(_OPENAI) or path == _MODELS_PATH


def http_target(request: HttpRequest, names: Collection[str]) -> HttpTarget:
    """Return the service of a request; raises NotSupported without a model name in an OpenAI body."""
    path = plain_path(request)
    if is_openai(path):
        return HttpTarget(_openai_name(request, path, names), may_stream=True)
    for prefix in _MODEL_PATH_PREFIXES:
        if path.startswith(prefix):
            name = _service_in_path(
                path.removeprefix(prefix), "".join(_path_without_double_slashes(request).split("/")[3:4]), names
            )
            return HttpTarget(name, path.endswith(_GENERATE_STREAM_SUFFIX))
    first = path.removeprefix("/").partition("/")[0]
    return HttpTarget(first, may_stream=True) if first in names else HttpTarget("", may_stream=False)


def _service_in_path(rest: str, segment: str, names: Collection[str]) -> str:
    """Return the service name at the start of ``rest``; ``segment`` is the first path segment, percent-encoded."""
    first = unquote(segment)
    named = first.rpartition(":")[0] if first not in names else first
    if named in names:
        return named
    with_slashes = (name for name in names if rest == name or rest.startswith((f"{name}/", f"{name}:")))
    return max(with_slashes, key=len, default=first.partition(":")[0])


def _openai_name(request: HttpRequest, path: str, names: Collection[str]) -> str:
    """Return the model of the body or the graph of the path; empty for JSON without a name (rejected anyway)."""
    try:
        document = orjson.loads(request.body)
    except orjson.JSONDecodeError:
        document = None
    name = document.get("model") if isinstance(document, dict) else None
    if isinstance(name, str):
        return name if name in names else name.removesuffix(_DEFAULT_TAG)
    if path.startswith(_V3_PREFIX) and (first := path.removeprefix(_V3_PREFIX).partition("/")[0]) in names:
        return first
    if request.method == "POST" and "json" in (request.header("content-type") or ""):
        return ""
    raise NotSupported(f"{path}: only JSON requests with a model are forwarded to other groups; {_INGRESS_HINT}")


def grpc_target(path: str, data: bytes) -> str:
    """Return the service of a gRPC call; empty for the server itself."""
    where = CALLS[path]
    if not where:
        return ""
    first = first_string_field(data)
    return (first if where == NAME else first_string_field(first)).decode(errors="replace")


# ----------------------------------------------------------------------
# Shard
# ----------------------------------------------------------------------

_NO_ID: Final = "missing sequence_id: the model is sharded by sequence id, so clients must choose ids"
_UNSUPPORTED_API: Final = "sequences of sharded models require KServe's ModelInfer or /v2/models/NAME/infer"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_HEAD_LENGTH: Final = "inference-header-content-length"


def shard_of(request: InferRequest, group: str, shards: int) -> str:
    """Return the shard of a sequence request; raises InvalidRequest if the request has no sequence id."""
    if shards == 1:
        return group
    control, _ = read_control(request)
    if not control.id:
        raise InvalidRequest(_NO_ID)
    return shard_names(group, shards)[owner_index(control.id, shards)]


def grpc_shard(path: str, data: bytes, group: str, shards: int) -> str:
    """Return the shard of a gRPC call; the first one for calls without sequence.

    Raises:
        InvalidRequest: malformed sequence request, or without sequence id.
        NotSupported: possibly a sequence request of another API.
    """
    if shards > 1 and path == INFER:
        return shard_of(decode_request(data), group, shards)
    if shards > 1 and CALLS[path] == MODEL_SPEC and path.endswith("/Predict"):
        raise NotSupported(_UNSUPPORTED_API)
    return shard_names(group, shards)[0]


def http_shard(request: HttpRequest, group: str, shards: int) -> str:
    """Return the shard of an HTTP request; the first one for requests without sequence.

    Raises:
        InvalidRequest: malformed sequence request, or without sequence id.
        NotSupported: possibly a sequence request of another API, or a request for the sequences of all shards.
    """
    if shards == 1:
        return group
    path = request.target.partition("?")[0].rstrip("/")
    if path.endswith("/infer") and request.method == "POST":
        return shard_of(read_infer_request("", "", request.body, request.header(_HEAD_LENGTH)), group, shards)
    if request.method not in _SAFE_METHODS or path.endswith("/sequences"):
        raise NotSupported(_UNSUPPORTED_API)
    return shard_names(group, shards)[0]
