"""Changes of the server that were refused, in its log: each is a line, unless the same is refused again and again.

Who can be reached by anybody must not let anybody fill its log: of one host, caller, change and reason there is one
line a minute, and one that says how often it was repeated; hosts beyond a number are counted together.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.core.errors import MissingScope
from ovmstrio.telemetry.log_rate_limit import RepeatedFaults
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.errors import ServerError

__all__ = ["bounded_refusals", "tell_refused"]

log = structlog.get_logger(__name__)

_REFUSED: Final = "change refused"
_MOST: Final = 200
_LONGEST: Final = 200

_bounds: Final[ContextVar[RepeatedFaults | None]] = ContextVar("refused changes", default=None)


@contextmanager
def bounded_refusals() -> Iterator[RepeatedFaults]:
    """Have what is refused in the tasks that are begun within the block be told within bounds.

    Gives what has to be run meanwhile, by its ``sum_up``, so that repetitions are told.
    """
    bounds = RepeatedFaults(log, most=_MOST)
    before = _bounds.set(bounds)
    try:
        yield bounds
    finally:
        _bounds.reset(before)


def tell_refused(
    change: str,
    error: ServerError,
    *,
    client: ClientAddress,
    caller: str = "",
    about: str = "",
    facts: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Tell of a change that was refused.

    Args:
        change: what was asked for, in words of which there are few.
        error: why it was refused.
        client: the address of the client.
        caller: who asks; empty where that is not known.
        about: what exactly was asked for, such as a path.
        facts: further ones of the first line.
    """
    whose = caller or (error.caller if isinstance(error, MissingScope) else "")
    host = str(client)
    told = {"change": change, "caller": whose, "client": host, **facts, "reason": cut(error.message, 2 * _LONGEST)}
    if about and about != change:
        told["about"] = cut(about, _LONGEST)
    bounds = _bounds.get()
    if bounds is None:
        log.warning(_REFUSED, **told)
    else:
        kind = " ".join((type(error).__name__, change, *((f"of {whose}",) if whose else ())))
        bounds.tell(_REFUSED, peer=host, kind=kind, level=logging.WARNING, **told)
