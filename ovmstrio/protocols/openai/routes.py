"""Routes of the OpenAI API.

::

    path ─> endpoint ─> body (JSON or multipart) ─> service by its model ─> answer, or events

An endpoint is a function that returns its routes over an :class:`OpenAIApi`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Final

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import MethodNotAllowed, NotFound, NotReady
from ovmstrio.protocols.openai.api import ERROR_FORMATS, OpenAIApi, OpenAIErrors
from ovmstrio.protocols.openai.background import BackgroundTasks
from ovmstrio.protocols.openai.batches import BatchRunner, batch_rules, refused_rules
from ovmstrio.protocols.openai.chat import Chat
from ovmstrio.protocols.openai.completions import Completions
from ovmstrio.protocols.openai.embeddings import embedding_rules
from ovmstrio.protocols.openai.files import FileLimits, FileStorage, file_rules
from ovmstrio.protocols.openai.images import image_rules
from ovmstrio.protocols.openai.lora_adapters import lora_adapter_rules
from ovmstrio.protocols.openai.models import model_rules
from ovmstrio.protocols.openai.raw_http_routes import answer_raw_request
from ovmstrio.protocols.openai.rerank import rerank_rules
from ovmstrio.protocols.openai.score import score_rules
from ovmstrio.protocols.openai.speech import speech_rules
from ovmstrio.protocols.openai.stored_responses import ResponseStore, StoreLimits, response_rules
from ovmstrio.protocols.openai.text_endpoint import text_rules
from ovmstrio.protocols.openai.tokenize import tokenize_rules
from ovmstrio.protocols.openai.transcriptions import transcription_rules
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.http.responses import json_response
from ovmstrio.transport.http.router import rule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.protocols.admin.changes import AdminChanges
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

# Health


def _health_rules(api: OpenAIApi) -> list[Rule]:
    """Return the unauthenticated ``/health`` route, which benchmarks and balancers of vLLM and llama.cpp use."""

    async def health(_: HttpRequest) -> HttpAnswer:
        readiness = api.plane.readiness()
        if not readiness.ready:
            raise NotReady(f"Server is not ready - {readiness.reason}")
        return json_response({"status": "ok"})

    return [rule("/health", "GET", health, is_hot=True, need=Permission.NOTHING)]


# Unknown paths


def _catch_all_rules(api: OpenAIApi, known: Sequence[Rule]) -> list[Rule]:
    """Return the routes of all other paths below ``/v3``, which services may answer; ``/v1`` has other APIs too."""

    async def answer(request: HttpRequest, path: str) -> HttpAnswer:
        target = f"{request.method} {request.path}"
        methods = {method for rule in known if rule.match(request.path) for method in rule.methods}
        if methods:
            raise MethodNotAllowed(f"{target}: use {' or '.join(sorted(methods - {'HEAD'}))}")
        answered = await answer_raw_request(api, request, path.removeprefix("v1/"))
        if answered is not None:
            return answered
        raise NotFound(f"{target}: unknown path {path!r:.80}; see /openapi.json")

    create = partial(api.rules, "/<path:path>", view=answer, has_tasks=True, prefixes=("/v3",))
    return [rule for method in ("GET", "POST") for rule in create(method=method)]


_OTHER_APIS: Final = ("/v1/models", "/v1/config")
"""Paths below ``/v1`` of TensorFlow Serving and OVMS."""


class OpenAIRouteErrors(OvmsRouteErrors):
    """Responses to requests without a route: below ``/v1`` in OpenAI's format, as OpenAI's clients expect."""

    def no_path(self, method: str, path: str) -> HttpAnswer:
        """Return the response to an unknown path."""
        if not _is_openai_path(path):
            return super().no_path(method, path)
        return OpenAIErrors().refuse(NotFound(f"{method} {path}: unknown path {path!r:.80}; see /openapi.json"))

    def no_method(self, method: str, path: str, allowed: Collection[str] = ()) -> HttpAnswer:
        """Return the response to an unsupported method."""
        if not allowed or not _is_openai_path(path):
            return super().no_method(method, path, allowed)
        return OpenAIErrors().refuse(MethodNotAllowed(f"{method} {path}: use {' or '.join(sorted(allowed))}"))


def _is_openai_path(path: str) -> bool:
    path = re.sub("/+", "/", path)
    return path.startswith("/v1/") and not path.startswith(_OTHER_APIS)


def route_errors(errors: str = "openai") -> OvmsRouteErrors:
    """Return the responses to requests without a route; ``errors`` is a key of ``ERROR_FORMATS``."""
    return OpenAIRouteErrors() if isinstance(ERROR_FORMATS[errors], OpenAIErrors) else OvmsRouteErrors()


# All endpoints


def _text_rules(api: OpenAIApi) -> list[Rule]:
    return [*text_rules(api, "/chat/completions", Chat()), *text_rules(api, "/completions", Completions())]


_ENDPOINTS: Final[tuple[Callable[[OpenAIApi], list[Rule]], ...]] = (
    _text_rules,
    embedding_rules,
    rerank_rules,
    tokenize_rules,
    score_rules,
    model_rules,
    _health_rules,
    transcription_rules,
    speech_rules,
    image_rules,
)


def openai_rules(
    plane: DataPlane,
    max_body_bytes: int,
    changes: AdminChanges,
    errors: str = "openai",
    *,
    keep_alive_seconds: float = 0,
    background: BackgroundTasks | None = None,
    responses: StoreLimits | None = None,
    files: FileLimits | None = None,
) -> list[Rule]:
    """Return the routes over one data plane.

    Args:
        plane: data plane.
        max_body_bytes: size limit of decoded bodies.
        changes: checks and logs administrative changes.
        errors: a key of ``ERROR_FORMATS``.
        keep_alive_seconds: interval of comments in text streams without events; 0 for none.
        background: runs tasks that outlive their requests.
        responses: limits of stored responses.
        files: folder of files and batches, and its limits; None for none.
    """
    api = OpenAIApi(plane, max_body_bytes, ERROR_FORMATS[errors], keep_alive_seconds=keep_alive_seconds)
    background = background or BackgroundTasks()
    store = ResponseStore(responses or StoreLimits(), plane.peers)
    rules = [rule for endpoint in _ENDPOINTS for rule in endpoint(api)] + lora_adapter_rules(api, changes)
    rules += response_rules(api, store, background)
    if files is None:
        rules += refused_rules(api)
    else:
        storage = FileStorage(files)
        rules += [*file_rules(api, storage), *batch_rules(api, BatchRunner(api, storage, background, rules))]
    return [*rules, *_catch_all_rules(api, rules)]
