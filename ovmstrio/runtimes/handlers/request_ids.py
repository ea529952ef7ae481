"""Which request a line of the log is about: the id that its client sent along, or one of the server's."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

from structlog.contextvars import bound_contextvars, get_contextvars

__all__ = ["current_request_id", "in_log", "request_id_for"]

_KEY: Final = "request_id"
_BYTES: Final = 8
_ACCEPTABLE: Final = re.compile(r"[!-~]{1,128}")


def request_id_for(sent: str | None) -> str:
    """Give the id of a request: what its client sent, if that can stand in a log and a header, or a new one."""
    return sent if sent is not None and _ACCEPTABLE.fullmatch(sent) else secrets.token_hex(_BYTES)


def in_log(*request_ids: str) -> AbstractContextManager[Any]:
    """Have every line that is logged within the block tell of these requests, in threads that it calls, too."""
    return bound_contextvars(**{_KEY: _joined(request_ids)})


def current_request_id() -> str:
    """Give the id of the request that is answered here, nothing if there is none."""
    return str(get_contextvars().get(_KEY, ""))


def _joined(request_ids: Iterable[str]) -> str:
    return ", ".join(filter(None, request_ids))
