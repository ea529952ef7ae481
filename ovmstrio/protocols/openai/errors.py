"""Error formats of the OpenAI endpoints: OpenAI's, and OVMS's for compatibility."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import orjson

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
from ovmstrio.serving.interfaces import GRAPH_MISSING
from ovmstrio.transport.http.responses import error_response, json_response, retry_after_headers
from ovmstrio.transport.statuses import error_status

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ovmstrio.core.http_messages import HttpAnswer

_MAX_MESSAGE_CHARACTERS: Final = 4096
_FAILURE: Final = "internal error; the server's log has the details"
_CLIENT_ERROR: Final = "invalid_request_error"
_SERVER_ERROR: Final = "server_error"


class ErrorFormat(ABC):
    """Error format."""

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
        answer = json_response(self.document(error), _status(error))
        return answer.with_headers(retry_after_headers(error)) if isinstance(error, ServerError) else answer

    def event(self, error: Exception) -> bytes:
        """Encode an error as an event, which OpenAI's clients raise; no ``[DONE]`` follows."""
        return b"data: %b\n\n" % json_response(self.document(error)).content

    def document(self, error: Exception) -> Mapping[str, Any]:
        """Return the error document."""
        message = error.message if isinstance(error, ServerError) else _FAILURE
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = f"{message[:_MAX_MESSAGE_CHARACTERS]}..."
        kind, code = next((kind, code) for category, kind, code in _ERROR_KINDS if isinstance(error, category))
        code = error.code if isinstance(error, InvalidField) else code
        field = error.field if isinstance(error, InvalidField) else "model" if isinstance(error, ServiceMissing) else ""
        return {"error": {"message": message, "type": kind, "param": field or None, "code": code or None}}


def _status(error: Exception) -> int:
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
"""Formats by the values of ``--openai_errors``."""
