"""The service that a request names, from its path or the first bytes of its message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import orjson

from ovmstrio.cluster.ray.grpc_paths import CALLS, NAME
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.encoding.protobuf_wire import first_string_field

if TYPE_CHECKING:
    from collections.abc import Collection

_INGRESS_HINT: Final = 'place all text models in the group "ingress"'


_BY_NAME: Final = ("/v1/models/", "/v2/models/")


_STREAMED: Final = "/generate_stream"


_OPENAI: Final = (
    "/v3/",
    "/v1/chat/",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/audio/",
    "/v1/images/",
    "/v1/rerank",
    "/v1/tokenize",
    "/v1/v2/rerank",
    "/v2/rerank",
)


_LIST: Final = "/v1/models"


_ANY_PATH: Final = "/v3/"


class HttpTarget(NamedTuple):
    """Service of a request (empty for the server itself), and whether the response may be streamed."""

    name: str
    may_stream: bool


def plain_path(request: HttpRequest) -> str:
    """Return the decoded path of a request without trailing slash."""
    return unquote(request.target.partition("?")[0]).rstrip("/") or "/"


def is_openai(path: str) -> bool:
    """Return whether a path belongs to the OpenAI API, whose bodies name the model."""
    return path.startswith(_OPENAI) or path == _LIST


def http_target(request: HttpRequest, names: Collection[str]) -> HttpTarget:
    """Return the service of a request; raises NotSupported without a model name in an OpenAI body."""
    path = plain_path(request)
    if is_openai(path):
        return HttpTarget(_openai_name(request, path, names), may_stream=True)
    for prefix in _BY_NAME:
        if path.startswith(prefix):
            name = path.removeprefix(prefix).partition("/")[0]
            return HttpTarget(name if name in names else name.partition(":")[0], path.endswith(_STREAMED))
    first = path.removeprefix("/").partition("/")[0]
    return HttpTarget(first, may_stream=True) if first in names else HttpTarget("", may_stream=False)


def _openai_name(request: HttpRequest, path: str, names: Collection[str]) -> str:
    """Return the model of the body or the graph of the path; empty for JSON without a name (rejected anyway)."""
    try:
        document = orjson.loads(request.body)
    except orjson.JSONDecodeError:
        document = None
    name = document.get("model") if isinstance(document, dict) else None
    if isinstance(name, str):
        return name
    if path.startswith(_ANY_PATH) and (first := path.removeprefix(_ANY_PATH).partition("/")[0]) in names:
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
