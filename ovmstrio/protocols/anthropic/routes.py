"""Routes of Anthropic's API, and its error format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ContextExceeded, NotFound, ServerError
from ovmstrio.core.events import current_request_id
from ovmstrio.protocols.anthropic.count_tokens import count_tokens_rules
from ovmstrio.protocols.anthropic.messages import Messages, encode_events
from ovmstrio.protocols.openai.api import ErrorFormat, OpenAIApi, client_message, client_status
from ovmstrio.protocols.openai.text_endpoint import text_rules
from ovmstrio.serving.interfaces import ANTHROPIC_REST
from ovmstrio.transport.http.responses import json_response, retry_after_headers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LAST_CLIENT_ERROR: Final = 499
_TOO_LONG: Final = "prompt is too long: "
"""Beginning of the message that clients recognize, to shorten the conversation."""


class AnthropicErrors(ErrorFormat):
    """Anthropic's format, ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

    def refuse(self, error: Exception) -> HttpAnswer:
        """Convert an error to a response."""
        document = self._document(error)
        answer = json_response(document, client_status(error))
        if "request_id" in document:
            # Clients read the id from this header.
            answer = answer.with_headers((("request-id", document["request_id"]),))
        return answer.with_headers(retry_after_headers(error)) if isinstance(error, ServerError) else answer

    def event(self, error: Exception) -> bytes:
        """Encode an error as the last event of a stream."""
        return encode_events((self._document(error),))

    @staticmethod
    def _document(error: Exception) -> Mapping[str, Any]:
        status, request_id = client_status(error), current_request_id.get()
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status <= _LAST_CLIENT_ERROR else "api_error")
        message = (_TOO_LONG if isinstance(error, ContextExceeded) else "") + client_message(error)
        document = {"type": "error", "error": {"type": kind, "message": message}}
        return document if request_id is None else {**document, "request_id": request_id.value}


def anthropic_rules(plane: DataPlane, max_body_bytes: int, keep_alive_seconds: float = 0) -> list[Rule]:
    """Return the routes over one data plane."""
    errors = AnthropicErrors()
    api = OpenAIApi(plane, max_body_bytes, errors, ANTHROPIC_REST, keep_alive_seconds=keep_alive_seconds)

    async def refuse_batch(request: HttpRequest) -> HttpAnswer:
        raise NotFound(f"{request.path}: message batches are not served; send the messages one by one")

    batches = api.rules("/messages/batches", "POST", refuse_batch)
    return [*text_rules(api, "/messages", Messages()), *count_tokens_rules(api), *batches]
