"""A log line for each request: quiet for those that succeed, loud for failures that are the server's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.core.errors import ModelFailure, ServerError
from ovmstrio.core.events import OK, CallObserver
from ovmstrio.core.texts import text_of

if TYPE_CHECKING:
    from ovmstrio.core.events import CallEvent

__all__ = ["RequestLog"]

log = structlog.get_logger(__name__)
_LEVEL: Final = logging.getLogger(__name__)
"""Tells what is logged at the time, without making a line of it."""


class RequestLog(CallObserver):
    """Observes calls and logs their ends."""

    def call_finished(self, event: CallEvent) -> None:
        """Log success and the caller's mistakes at debug level, failures of services or the server at error level."""
        error = event.error
        if event.code != OK and _is_failure(event):
            log.error("request failed", **_facts(event), exc_info=error)
        elif not _LEVEL.isEnabledFor(logging.DEBUG):
            return
        elif event.code == OK:
            log.debug("request", **_facts(event))
        else:
            log.debug("request refused", **_facts(event), reason=text_of(error) if error else event.reason)


def _is_failure(event: CallEvent) -> bool:
    """Tell whether an error is the server's; one with a code that is not its name was judged by who answered."""
    error = event.error
    if not isinstance(error, Exception) or event.code != type(error).__name__:
        return False
    return isinstance(error, ModelFailure) or not isinstance(error, ServerError)


def _facts(event: CallEvent) -> dict[str, object]:
    whose = {"caller": event.caller} if event.caller else {}
    return {
        **whose,
        "model": event.name,
        "version": event.version,
        "kind": event.kind,
        "api": event.door.api,
        "method": event.method,
        "interface": event.door.interface,
        "request_id": event.request_id,
        "code": event.code,
        "milliseconds": round(event.seconds * 1e3, 3),
        "queue_milliseconds": round(event.queue_seconds * 1e3, 3),
        "compute_milliseconds": round(event.compute_seconds * 1e3, 3),
        "received": event.received,
        "sent": event.sent,
    }
