"""Rate-limited log of denied admin changes.

At most one line per minute, client host, caller, change and reason, so that clients cannot fill the log.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.core.errors import MissingScope
from ovmstrio.telemetry.log_rate_limit import LogRateLimiter
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.errors import ServerError

log = structlog.get_logger(__name__)

_REFUSED: Final = "change refused"
_MAX_WINDOWS: Final = 200
_MAX_CHARACTERS: Final = 200

_rate_limiter: Final[ContextVar[LogRateLimiter | None]] = ContextVar("refused changes", default=None)


@contextmanager
def rate_limited_denials() -> Iterator[LogRateLimiter]:
    """Rate-limit denials of tasks started within the block.

    Yields the rate limiter, caller_name ``log_repetitions`` must run in a task.
    """
    bounds = LogRateLimiter(log, most=_MAX_WINDOWS)
    before = _rate_limiter.set(bounds)
    try:
        yield bounds
    finally:
        _rate_limiter.reset(before)


def log_denied(
    change: str,
    error: ServerError,
    *,
    client: ClientAddress,
    caller: str = "",
    about: str = "",
    facts: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Log a denied change.

    Args:
        change: kind of change; low cardinality.
        error: the reason.
        client: address of the client.
        caller: name of the caller, or empty.
        about: details such as a path.
        facts: fields of the first line.
    """
    caller_name = caller or (error.caller if isinstance(error, MissingScope) else "")
    host = str(client)
    fields = {
        "change": change,
        "caller": caller_name,
        "client": host,
        **facts,
        "reason": cut(error.message, 2 * _MAX_CHARACTERS),
    }
    if about and about != change:
        fields["about"] = cut(about, _MAX_CHARACTERS)
    bounds = _rate_limiter.get()
    if bounds is None:
        log.warning(_REFUSED, **fields)
    else:
        kind = " ".join((type(error).__name__, change, *((f"of {caller_name}",) if caller_name else ())))
        bounds.tell(_REFUSED, peer=host, kind=kind, level=logging.WARNING, **fields)
