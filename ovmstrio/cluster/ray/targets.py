"""Which service a request is about, as far as its first bytes tell: what the group with the doors goes by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import orjson

from ovmstrio.cluster.ray.grpc_paths import CALLS, NAME
from ovmstrio.core.errors import NotSupported
from ovmstrio.serving.early_admission import first_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.core.http import HttpRequest

__all__ = ["HttpTarget", "grpc_target", "http_target", "is_openai", "plain_path"]

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
_WAY_OUT: Final = 'place all models of text in the group "ingress"'


class HttpTarget(NamedTuple):
    """What a request is about: a service, none if it is about the server, and whether its answer may be a stream."""

    name: str
    may_stream: bool


def plain_path(request: HttpRequest) -> str:
    """Give the path of a request, decoded, without the slash at its end that does not matter."""
    return unquote(request.target.partition("?")[0]).rstrip("/") or "/"


def is_openai(path: str) -> bool:
    """Tell whether a path is one of OpenAI's API, where the body says which service it is about."""
    return path.startswith(_OPENAI) or path == _LIST


def http_target(request: HttpRequest, names: Collection[str]) -> HttpTarget:
    """Tell which of these services a request is about.

    Raises:
        NotSupported: it is one of OpenAI's that does not say so where this looks.
    """
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
    """Give the name in the body, or in the path of a graph's own; empty for JSON without one, which any refuses."""
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
    raise NotSupported(f"{path}: only requests whose JSON has a model are passed on to other groups; {_WAY_OUT}")


def grpc_target(path: str, data: bytes) -> str:
    """Tell which service a call is about; empty if it is about the server."""
    where = CALLS[path]
    if not where:
        return ""
    first = first_text(data)
    return (first if where == NAME else first_text(first)).decode(errors="replace")
