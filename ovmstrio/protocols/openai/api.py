"""Base of the OpenAI endpoints: error formats, body parsing, service lookup and routes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import parse_qs

import orjson

from ovmstrio.core.callers import Permission, current_caller
from ovmstrio.core.errors import (
    DeadlineExceeded,
    InvalidField,
    InvalidRequest,
    MalformedJson,
    MethodNotAllowed,
    NotFound,
    NotReady,
    NotSupported,
    Overloaded,
    PermissionDenied,
    ServerError,
    ServiceMissing,
    Unauthenticated,
)
from ovmstrio.core.generation import Task
from ovmstrio.encoding.json_reader import JsonLimitExceeded, JsonSyntaxError, parse_json, parse_strictly
from ovmstrio.protocols.openai.fields import shown, type_of
from ovmstrio.serving.generation_calls import lease_generative
from ovmstrio.serving.interfaces import GRAPH_MISSING, OPENAI_REST
from ovmstrio.serving.kind import CallType
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.transport.http.responses import error_response, json_response, retry_after_headers
from ovmstrio.transport.http.router import rule
from ovmstrio.transport.http.sse import EVENT_HEADERS
from ovmstrio.transport.statuses import error_status
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.events import ApiInterface
    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.http_messages import Headers, HttpAnswer, HttpRequest
    from ovmstrio.protocols.openai.known_fields import KnownFields
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule, View

# ----------------------------------------------------------------------
# Error formats: OpenAI's, and OVMS's for compatibility
# ----------------------------------------------------------------------

_MAX_MESSAGE_CHARACTERS: Final = 4096
_FAILURE: Final = "internal error; the server's log has the details"
_CLIENT_ERROR: Final = "invalid_request_error"
_SERVER_ERROR: Final = "server_error"


class ErrorFormat(ABC):
    """Error format; ``ignores_unknown_fields`` is whether unknown fields of bodies are no errors."""

    ignores_unknown_fields = False

    @abstractmethod
    def refuse(self, error: Exception) -> HttpAnswer:
        """Convert an error to a response; internal errors reveal nothing."""

    @abstractmethod
    def event(self, error: Exception) -> bytes:
        """Encode an error that ends a started stream."""


class OpenAIErrors(ErrorFormat):
    """OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``.

    OpenAI's clients retry status 408, 409, 429 and 5xx, so a client error never has one of these statuses.
    """

    def refuse(self, error: Exception) -> HttpAnswer:
        """Convert an error to a response."""
        answer = json_response(self.document(error), client_status(error))
        return answer.with_headers(retry_after_headers(error)) if isinstance(error, ServerError) else answer

    def event(self, error: Exception) -> bytes:
        """Encode an error as an event, which OpenAI's clients raise; no ``[DONE]`` follows."""
        return b"data: %b\n\n" % json_response(self.document(error)).content

    def document(self, error: Exception) -> Mapping[str, Any]:
        """Return the error document."""
        kind, code = next((kind, code) for category, kind, code in _ERROR_KINDS if isinstance(error, category))
        code = error.code if isinstance(error, InvalidField) else code
        field = "model" if isinstance(error, ServiceMissing | NotSupported) else ""
        field = error.field if isinstance(error, InvalidField) else field
        return {"error": {"message": client_message(error), "type": kind, "param": field or None, "code": code or None}}


def client_message(error: Exception) -> str:
    """Return the message for a client; internal errors reveal nothing."""
    message = error.message if isinstance(error, ServerError) else _FAILURE
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else f"{message[:_MAX_MESSAGE_CHARACTERS]}..."


def client_status(error: Exception) -> int:
    """Return the status for clients that retry 408, 409, 429 and 5xx."""
    match error:
        case MalformedJson() | NotSupported():
            return 400
        case MethodNotAllowed():
            return 405
        case NotReady():
            # A loading model is worth a retry.
            return 503
        case Overloaded():
            return 429
        case ServerError():
            return error_status(error).http
    return 500


_ERROR_KINDS: Final[tuple[tuple[type[Exception], str, str], ...]] = (
    (MalformedJson, _CLIENT_ERROR, "invalid_json"),
    (ServiceMissing, _CLIENT_ERROR, "model_not_found"),
    (NotSupported, _CLIENT_ERROR, "unsupported"),
    (InvalidRequest, _CLIENT_ERROR, ""),
    (NotFound, _CLIENT_ERROR, ""),
    (Unauthenticated, _CLIENT_ERROR, "invalid_api_key"),
    (PermissionDenied, "permission_error", ""),
    (Overloaded, "rate_limit_error", "rate_limit_exceeded"),
    (NotReady, _SERVER_ERROR, "service_unavailable"),
    (DeadlineExceeded, _SERVER_ERROR, "timeout"),
    (Exception, _SERVER_ERROR, ""),
)
"""Error types and codes by class; the first matching class applies."""


_NODE_ERROR_PREFIX: Final = (
    "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: \n"
    'Calculator::Process() for node "LLMExecutor" failed: '
)
_NOT_JSON: Final = "The file is not valid json"
_READ_FIRST: Final = frozenset({"model", "stream"})  # Fields that OVMS parses before it looks up the model
_PRECONDITION_FAILED: Final = 412


class _OvmsErrors(ErrorFormat):
    """OVMS's format, ``{"error": text}``, with its texts and statuses."""

    ignores_unknown_fields = True

    def refuse(self, error: Exception) -> HttpAnswer:
        match error:
            case ServiceMissing():
                return json_response({"error": GRAPH_MISSING}, 404)
            case MalformedJson():
                return json_response(
                    {"error": f"{_NOT_JSON} - {error.message.partition(':')[0]}"}, _PRECONDITION_FAILED
                )
            case InvalidField() if error.field in _READ_FIRST:
                return json_response({"error": f"{_NOT_JSON} - {error.plain}"}, _PRECONDITION_FAILED)
            case InvalidField():
                return json_response({"error": _NODE_ERROR_PREFIX + error.plain}, 400)
        return error_response(error)

    def event(self, error: Exception) -> bytes:
        return orjson.dumps({"error": error.message if isinstance(error, ServerError) else _FAILURE})


ERROR_FORMATS: Final[Mapping[str, ErrorFormat]] = {"openai": OpenAIErrors(), "ovms": _OvmsErrors()}
"""Formats by the values of ``--openai-errors``."""


# ----------------------------------------------------------------------
# Bodies, services and routes
# ----------------------------------------------------------------------

DONE: Final = b"data: [DONE]\n\n"


def encode_event(document: Mapping[str, Any]) -> bytes:
    """Encode a document as an unnamed event."""
    return b"data: %b\n\n" % orjson.dumps(document)


PREFIXES: Final = ("/v3", "/v1", "/v3/v1")
"""Path prefixes: OVMS's, OpenAI's, and an intermediate one of OVMS."""

_MAX_NAMES: Final = 8
_NAME_CHARACTERS: Final = 80
_MAX_MODEL_CHARACTERS: Final = 1024


class Body(NamedTuple):
    """JSON body that names a model; ``size`` is its decoded size in bytes."""

    document: dict[str, Any]
    model: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class OpenAIApi:
    """OpenAI API, or another one for text models, over one data plane.

    Attributes:
        max_body_bytes: limit of decoded bodies.
        form: error format.
        interface: metric label of calls.
        stream_headers: headers of streamed responses.
        keep_alive_seconds: interval of comments in streams without events; 0 for none.
    """

    plane: DataPlane
    max_body_bytes: int
    form: ErrorFormat
    interface: ApiInterface = OPENAI_REST
    stream_headers: Headers = EVENT_HEADERS
    keep_alive_seconds: float = 0

    def rules(
        self,
        path: str,
        method: str,
        view: View,
        *,
        has_tasks: bool = False,
        prefixes: tuple[str, ...] = PREFIXES,
        need: Permission = Permission.GENERATE,
    ) -> list[Rule]:
        """Return the routes of a path below the prefixes; ``has_tasks`` gives the view a nursery."""
        options: dict[str, Any] = {"is_hot": True, "has_tasks": has_tasks, "refuse": self.form.refuse}
        options["need"] = need
        rules = [rule(prefix + path, method, view, **options) for prefix in prefixes]
        # Without a prefix, a service of the same name keeps its path.
        return [each if prefix else each._replace(first="") for prefix, each in zip(prefixes, rules, strict=True)]

    async def body(self, request: HttpRequest, known: KnownFields, *, needs_model: bool = True) -> Body:
        """Parse a JSON body; raise ``MalformedJson``, ``InvalidField`` (no model) or ``PayloadTooLarge``.

        Unless it ``needs_model``, a body without a model means the only text model.
        """
        data = await decompressed_body(request, self.max_body_bytes)
        document = await read_document(data)
        if self.form.ignores_unknown_fields:
            document = known.without_unknown(document)
        if not needs_model and document.get("model") is None:
            names = [name for name in self.plane.statuses() if tasks_of(self.plane, name) & _TEXT_TASKS]
            document = {**document, "model": names[0]} if len(names) == 1 else document
        return Body(document, model_name(document), len(data))

    async def call(
        self, request: HttpRequest, name: str, task: Task | None, *, is_stream: bool = False
    ) -> ObservedCall:
        """Lease the service that a body names, as ``DataPlane.call``.

        Raises:
            ServiceMissing: unknown service; the message lists the known ones.
            NotSupported: the service does not support ``task`` (None: any).
        """
        method = "Stream" if is_stream else "Unary"
        sent_id = request.header("x-request-id") or ""
        call = partial(lease_generative, self.plane, name, task, self.interface, method, is_stream=is_stream)
        try:
            return await call(request_id=sent_id, received=len(request.body))
        except ServiceMissing:
            raise self.missing(name) from None

    def missing(self, name: str) -> ServiceMissing:
        """Return the error for an unknown service."""
        known = sorted(self.plane.statuses())
        more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
        names = ", ".join(cut(each, _NAME_CHARACTERS) for each in known[:_MAX_NAMES])
        available = f"available: {names}{more}" if known else "no model is loaded"
        return ServiceMissing(f"The model `{cut(name, _NAME_CHARACTERS)}` does not exist; {available}")


_TEXT_TASKS: Final = frozenset({Task.TEXT_GENERATION, Task.EMBEDDINGS, Task.RERANK})


def tasks_of(plane: DataPlane, name: str) -> frozenset[Task]:
    """Return the OpenAI tasks of a service; empty for most services."""
    try:
        accepts, service = plane.registry.call_types(name), plane.registry.peek(name)
    except ServerError:
        return frozenset()
    return cast("GenerativeService", service).tasks if CallType.GENERATION in accepts else frozenset()


def caller_key() -> str:
    """Return the owner of data that the current caller stores; empty without authentication."""
    caller = current_caller.get()
    return "" if caller is None else f"{caller.proof} {caller.name}"


def query_number(query: Mapping[str, Sequence[str]], name: str, default: int, allowed: range) -> int:
    """Return a number of a URL's query; raise ``InvalidField`` unless it is in ``allowed``."""
    given = query.get(name, [str(default)])[-1]
    if not re.fullmatch(r"-?[0-9]{1,10}", given) or int(given) not in allowed:
        message = f"{name}: expected an integer from {allowed[0]} to {allowed[-1]}"
        raise InvalidField(message, field=name, got=shown(given))
    return int(given)


def page_of(items: Sequence[Mapping[str, Any]], query: str, *, most: int = 100) -> dict[str, Any]:
    """Return a page of a list, oldest item first, as a URL's query requests it (``limit``, ``after``, ``order``).

    Raises ``InvalidField`` for an invalid query.
    """
    given = parse_qs(query)
    limit = query_number(given, "limit", 20, range(1, most + 1))
    order = given.get("order", ["desc"])[-1]
    if order not in {"asc", "desc"}:
        raise InvalidField("order should be asc or desc", field="order", got=shown(order))
    sorted_items = list(items) if order == "asc" else list(reversed(items))
    after = given.get("after", [""])[-1]
    if after:
        place = next((number for number, item in enumerate(sorted_items) if item.get("id") == after), None)
        if place is None:
            raise InvalidField("after: no such item", field="after", got=shown(after))
        sorted_items = sorted_items[place + 1 :]
    page = sorted_items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(sorted_items) > limit}


async def read_document(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, in a worker thread if it is large; raise ``MalformedJson`` or ``InvalidField``."""
    try:
        document = await parse_json(body, parse=parse_strictly)
    except JsonSyntaxError as error:
        raise MalformedJson(f"Cannot parse JSON body: {error}") from None
    except JsonLimitExceeded as error:
        raise InvalidField(f"JSON body: {error}") from None
    if not isinstance(document, dict):
        raise MalformedJson(f"JSON body must be an object: got {type_of(document)}")
    return document


def model_name(document: dict[str, Any]) -> str:
    """Return the model that a body names; raise ``InvalidField`` if it is missing or invalid."""
    model = document.get("model")
    if model is None:
        raise InvalidField("model field is missing in JSON body", field="model", code="missing_required_parameter")
    if not isinstance(model, str):
        raise InvalidField("model field is not a string", field="model", got=type_of(model))
    if len(model) > _MAX_MODEL_CHARACTERS:
        message = f"model field: expected at most {_MAX_MODEL_CHARACTERS} characters"
        raise InvalidField(message, field="model", got=str(len(model)))
    return model
