"""How long a client of REST is ready to wait, as it says in a header."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import InvalidField

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpRequest

__all__ = ["deadline_of"]

_HEADER: Final = "x-request-timeout"
_MOST_SECONDS: Final = 86_400.0


def deadline_of(request: HttpRequest) -> float:
    """Tell until when, on trio's clock, an answer is waited for: ``X-Request-Timeout`` seconds; without it for ever.

    Raises:
        InvalidField: the header is no number of seconds above 0.
    """
    said = request.header(_HEADER)
    if said is None:
        return math.inf
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidField(
            "X-Request-Timeout: expected seconds above 0", field="X-Request-Timeout", got=repr(said[:40])
        )
    return trio.current_time() + min(seconds, _MOST_SECONDS)
