"""A line of the log for each answer, as servers of handlers write it."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

__all__ = ["log_access"]

_LOGGER: Final = logging.getLogger("uvicorn.access")
_TEXTS: Final = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}


def log_access(client: str, verb: str, target: str, status: int, request_id: str = "") -> None:
    """Log that a request has been answered; ``client`` is who asked, if that is known, as ``request_id`` is."""
    if not _LOGGER.isEnabledFor(logging.INFO):
        return
    code = _TEXTS.get(status, str(status))
    path = target.partition("?")[0]
    extra = {"method": verb, "path": path, "status_code": code}
    if request_id:
        extra["request_id"] = request_id
    _LOGGER.info('%s - "%s %s HTTP/1.1" %s', client or "-", verb, target, code, extra=extra)
