"""Deadline from the ``X-Request-Timeout`` header of a REST request."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import InvalidField
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import HttpRequest

_HEADER: Final = "x-request-timeout"
_MAX_SECONDS: Final = 86_400.0


def request_deadline(request: HttpRequest) -> float:
    """Return the deadline in trio time from the ``X-Request-Timeout`` header (seconds); infinite without it.

    Raises ``InvalidField`` if the header is not a positive number.
    """
    value = request.header(_HEADER)
    if value is None:
        return math.inf
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidField(
            "X-Request-Timeout: expected seconds above 0", field="X-Request-Timeout", got=shown(value, 40)
        )
    return trio.current_time() + min(seconds, _MAX_SECONDS)
