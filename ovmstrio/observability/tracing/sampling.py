"""Which calls are recorded: as their callers are, and of those that have no parent a share.

The names are those of ``OTEL_TRACES_SAMPLER``.  A share is taken by the trace's id, so that all servers that a call
passes through decide alike.
"""

from __future__ import annotations

from random import getrandbits, randrange
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.observability.tracing.trace_context import TraceParent

__all__ = ["ALWAYS", "SAMPLERS", "TraceSampling"]

_PARENT_BASED: Final = "parentbased_"
_RATIOS: Final = {"always_on": 1.0, "always_off": 0.0}
_RATIO: Final = "traceidratio"
SAMPLERS: Final = tuple(f"{prefix}{name}" for prefix in ("", _PARENT_BASED) for name in (*_RATIOS, _RATIO))
"""The names that are understood."""
_LOW: Final = 64
"""Bits of a trace's id, by which a share is taken."""
_LOW_BITS: Final = 2**_LOW - 1


class TraceSampling:
    """Decides for one call after the other.

    Args:
        name: one of :data:`SAMPLERS`.
        ratio: the share, from 0 to 1, where the name has one.

    Raises:
        ValueError: the name is none of them, or the ratio out of its bounds.

    Attributes:
        share: of the calls without a parent, from 0 to 1.
    """

    def __init__(self, name: str = "parentbased_always_on", ratio: float = 1.0) -> None:
        if name not in SAMPLERS:
            raise ValueError(f"expected one of {', '.join(SAMPLERS)}, got {name!r}")
        if not 0 <= ratio <= 1:
            raise ValueError(f"expected a ratio from 0 to 1, got {ratio}")
        self._follows_parent = name.startswith(_PARENT_BASED)
        self.share: Final = _RATIOS.get(name.removeprefix(_PARENT_BASED), ratio)
        # Traces without a parent are recorded whose last 64 bits are a smaller number.
        self._bound: Final = round(self.share * (_LOW_BITS + 1))

    def records(self, trace_id: int, parent: TraceParent | None) -> bool:
        """Decide for a call of a trace."""
        if parent is not None and self._follows_parent:
            return parent.is_sampled
        return trace_id & _LOW_BITS < self._bound

    def new_id(self, *, is_recorded: bool) -> int:
        """Make the id of a trace of which it is decided whether it is recorded, as all others decide by it then."""
        bound = self._bound
        if bound > _LOW_BITS or not bound:
            return getrandbits(2 * _LOW) or 1
        low = randrange(bound) if is_recorded else randrange(bound, _LOW_BITS + 1)  # noqa: S311 - no secret
        return (getrandbits(_LOW) or 1) << _LOW | low


ALWAYS: Final = TraceSampling("always_on")
