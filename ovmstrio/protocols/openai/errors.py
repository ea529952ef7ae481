"""How errors of OpenAI's API are told: as OpenAI's clients read them, or as OVMS tells them."""

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
from ovmstrio.transport.http.responses import error_answer, json_answer, retry_after
from ovmstrio.transport.statuses import status_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ovmstrio.core.http import HttpAnswer

__all__ = ["FORMS", "ErrorForm", "OpenAIErrors", "OvmsErrors"]

_MOST_CHARACTERS: Final = 4096
_FAILURE: Final = "internal error; the server's log has the details"
_CALLERS_FAULT: Final = "invalid_request_error"
_SERVERS_FAULT: Final = "server_error"


class ErrorForm(ABC):
    """A form of errors."""

    @abstractmethod
    def refuse(self, error: Exception) -> HttpAnswer:
        """Answer with an error; of one that nobody foresaw nothing is told."""

    @abstractmethod
    def event(self, error: Exception) -> bytes:
        """Write an error that ends a stream whose answer has begun."""


class OpenAIErrors(ErrorForm):
    """``{"error": {"message", "type", "param", "code"}}``; a mistake of the caller's is never above 499.

    OpenAI's clients try again what has the status 408, 409, 429 or one above 499.
    """

    def refuse(self, error: Exception) -> HttpAnswer:
        """Answer with an error."""
        answer = json_answer(self.document(error), _status(error))
        return answer.with_headers(retry_after(error)) if isinstance(error, ServerError) else answer

    def event(self, error: Exception) -> bytes:
        """Write an error as an event, which OpenAI's clients raise; no ``[DONE]`` follows."""
        return b"data: %b\n\n" % json_answer(self.document(error)).content

    def document(self, error: Exception) -> Mapping[str, Any]:
        """Say what is wrong."""
        message = error.message if isinstance(error, ServerError) else _FAILURE
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_MOST_CHARACTERS]}..."
        kind, code = _kind_and_code(error)
        field = error.field if isinstance(error, InvalidField) else "model" if isinstance(error, ServiceMissing) else ""
        return {"error": {"message": message, "type": kind, "param": field or None, "code": code or None}}


def _status(error: Exception) -> int:
    match error:
        case MalformedJson() | NotSupported():
            return 400
        case MethodNotAllowed():
            return 405
        case NotReady():
            # A model that is being loaded is worth another try.
            return 503
        case Overloaded():
            return 429
        case ServerError():
            return status_of(error).http
    return 500


_WORDS: Final[tuple[tuple[type[Exception], str, str], ...]] = (
    (MalformedJson, _CALLERS_FAULT, "invalid_json"),
    (ServiceMissing, _CALLERS_FAULT, "model_not_found"),
    (NotSupported, _CALLERS_FAULT, "unsupported"),
    (InvalidRequest, _CALLERS_FAULT, ""),
    (NotFound, _CALLERS_FAULT, ""),
    (Unauthenticated, _CALLERS_FAULT, "invalid_api_key"),
    (PermissionDenied, "permission_error", ""),
    (Overloaded, "rate_limit_error", "rate_limit_exceeded"),
    (NotReady, _SERVERS_FAULT, "service_unavailable"),
    (DeadlineExceeded, _SERVERS_FAULT, "timeout"),
    (Exception, _SERVERS_FAULT, ""),
)
"""What kind of error a class is, and its word for programs; the first that fits counts."""


def _kind_and_code(error: Exception) -> tuple[str, str]:
    kind, code = next((kind, code) for made, kind, code in _WORDS if isinstance(error, made))
    return kind, error.code if isinstance(error, InvalidField) else code


_NODE: Final = (
    "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: \n"
    'Calculator::Process() for node "LLMExecutor" failed: '
)
_NOT_JSON: Final = "The file is not valid json"
_READ_FIRST: Final = frozenset({"model", "stream"})
"""Fields that OVMS reads before it looks for what is called."""
_PRECONDITION_FAILED: Final = 412


class OvmsErrors(ErrorForm):
    """``{"error": text}`` with OVMS's texts and statuses, for clients that compare them."""

    def refuse(self, error: Exception) -> HttpAnswer:
        """Answer with an error."""
        match error:
            case ServiceMissing():
                return json_answer({"error": GRAPH_MISSING}, 404)
            case MalformedJson():
                return json_answer({"error": f"{_NOT_JSON} - {error.message.partition(':')[0]}"}, _PRECONDITION_FAILED)
            case InvalidField() if error.field in _READ_FIRST:
                return json_answer({"error": f"{_NOT_JSON} - {error.plain}"}, _PRECONDITION_FAILED)
            case InvalidField():
                return json_answer({"error": _NODE + error.plain}, 400)
        return error_answer(error)

    def event(self, error: Exception) -> bytes:
        """Write an error bare, as OVMS does within a stream."""
        return orjson.dumps({"error": error.message if isinstance(error, ServerError) else _FAILURE})


FORMS: Final[Mapping[str, ErrorForm]] = {"openai": OpenAIErrors(), "ovms": OvmsErrors()}
"""By the values of ``--openai_errors``."""
