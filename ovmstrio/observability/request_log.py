"""A log line for each request: quiet for those that succeed, loud for failures that are the server's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from ovmstrio.core.errors import ModelFailure, ServerError
from ovmstrio.core.events import OK

if TYPE_CHECKING:
    from ovmstrio.core.events import RequestEvent

__all__ = ["RequestLog"]

log = structlog.get_logger(__name__)


class RequestLog:
    """Observes requests and logs their ends."""

    def request_started(self, event: RequestEvent) -> None:
        """Nothing is known yet that is worth a line."""

    def request_finished(self, event: RequestEvent, code: str, error: BaseException | None) -> None:
        """Log success and the caller's mistakes at debug level, failures of the model or the server at error level."""
        if code == OK:
            log.debug("request", **_facts(event, code))
        elif isinstance(error, Exception) and (isinstance(error, ModelFailure) or not isinstance(error, ServerError)):
            log.error("request failed", **_facts(event, code), exc_info=error)
        else:
            log.debug("request refused", **_facts(event, code), reason=str(error) if error else "")


def _facts(event: RequestEvent, code: str) -> dict[str, object]:
    return {
        "model": event.name,
        "version": event.version,
        "method": event.method,
        "interface": event.interface,
        "request_id": event.request_id,
        "code": code,
        "milliseconds": round(event.seconds * 1e3, 3),
    }
