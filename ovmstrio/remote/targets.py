"""Which address a call goes to: in turns, those that are well first; requests of a sequence to where it began."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.core.service import readiness_may_have_changed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from ovmstrio.remote.endpoint import Endpoint
    from ovmstrio.remote.servable import SequenceStep

__all__ = ["Breaker", "Target", "Targets", "watch"]

# ----------------------------------------------------------------------
# When an address is left alone: a state machine without a clock of its own
# ----------------------------------------------------------------------


class Breaker:
    """Counts failures of one address, and says whether it may be called.

    Args:
        failures: so many in a row open the circuit; 0 for never.
        open_seconds: how long it is open before one call may try whether it still has to be.
    """

    __slots__ = ("_failures", "_in_row", "_is_trying", "_open_seconds", "_opened")

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._failures = failures
        self._open_seconds = open_seconds
        self._in_row = 0
        self._opened: float | None = None
        self._is_trying = False

    @property
    def failures_in_row(self) -> int:
        """How many calls have failed since the last one that succeeded."""
        return self._in_row

    def seconds_left(self, now: float) -> float:
        """Tell for how long no call may be made; 0 if one may, or if that depends on a call that is under way."""
        return 0.0 if self._opened is None else max(0.0, self._opened + self._open_seconds - now)

    def allows(self, now: float) -> bool:
        """Tell whether a call may be made."""
        if self._opened is None:
            return True
        return not self._is_trying and now >= self._opened + self._open_seconds

    def begin(self) -> None:
        """Note that a call is made, which is allowed; while the circuit is not closed, it is the only one."""
        self._is_trying = self._opened is not None

    def succeed(self) -> None:
        """Note that the address has answered: the circuit is closed."""
        self._in_row = 0
        self._opened = None
        self._is_trying = False

    def fail(self, now: float) -> None:
        """Note that the address has failed a call."""
        self._in_row += 1
        if self._is_trying or (self._failures and self._in_row >= self._failures):
            self._opened = now
        self._is_trying = False

    def abandon(self) -> None:
        """Note that a call ended without saying anything of the address; another one may try."""
        self._is_trying = False


# ----------------------------------------------------------------------
# Which address a call goes to: in turns, those that are well first; requests of a sequence to where it began
# ----------------------------------------------------------------------

_MOST_DEVIATIONS: Final = 65_536
"""Sequences that are remembered because they are elsewhere than their ids say; the oldest are forgotten first."""


class Target:
    """One address, with what is known of it.

    Attributes:
        endpoint: how it is called.
        breaker: whether it may be.
        ailment: why it would not answer, as far as is known; empty if it is well.
        suspect: is set where a call has found that it is not.
    """

    __slots__ = ("ailment", "breaker", "endpoint", "suspect")

    def __init__(self, endpoint: Endpoint, breaker: Breaker) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        self.ailment = ""
        self.suspect = trio.Event()

    def obstacle(self, now: float) -> str:
        """Tell why it cannot be called, empty if it can."""
        if self.ailment:
            return f"{self.endpoint.address}: {self.ailment}"
        left = self.breaker.seconds_left(now)
        if not left:
            return ""
        failures = self.breaker.failures_in_row
        return f"{self.endpoint.address}: left alone for {left:.1f} s more, after {failures} failures in a row"


class Targets:
    """All addresses of one model."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.all = tuple(targets)
        self._turn = 0
        self._deviations: OrderedDict[int | str, Target] = OrderedDict()

    def obstacle(self, now: float) -> str:
        """Tell why no address can be called, empty if one can."""
        obstacles = [target.obstacle(now) for target in self.all]
        return "; ".join(obstacles) if all(obstacles) else ""

    def choose(self, now: float, tried: Collection[Target] = ()) -> Target | None:
        """Choose the next address in turn, of those that may be called and were not tried; well ones come first."""
        first = self._turn % len(self.all)
        # Further attempts at one call take nobody's turn.
        self._turn += not tried
        in_turn = (*self.all[first:], *self.all[:first])
        allowed = [target for target in in_turn if target not in tried and target.breaker.allows(now)]
        return min(allowed, key=lambda target: bool(target.ailment), default=None)

    def of_sequence(self, step: SequenceStep, now: float) -> Target:
        """Give the address of a sequence; where it begins, one that is well.

        The id says which it is, so that nothing is remembered of most sequences, and a server that is started anew
        finds them; a sequence that began while that address was not well is remembered to be elsewhere.
        """
        own = max(self.all, key=lambda target: _weight(step.id, target))
        if not step.starts:
            return self._deviations.get(step.id, own)
        well = [target for target in self.all if not target.ailment and target.breaker.allows(now)]
        chosen = max(well, key=lambda target: _weight(step.id, target)) if well else own
        self.place(step.id, chosen)
        return chosen

    def place(self, sequence: int | str, target: Target) -> None:
        """Remember where a sequence is."""
        self.forget(sequence)
        if target is not max(self.all, key=lambda each: _weight(sequence, each)):
            self._deviations[sequence] = target
            if len(self._deviations) > _MOST_DEVIATIONS:
                self._deviations.popitem(last=False)

    def forget(self, sequence: int | str) -> None:
        """Forget where a sequence was that has ended."""
        self._deviations.pop(sequence, None)


def _weight(sequence: int | str, target: Target) -> bytes:
    return blake2b(f"{sequence}@{target.endpoint.address}".encode(), digest_size=8).digest()


# ----------------------------------------------------------------------
# Whether the addresses of a model answer, asked again and again
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_ASK_SECONDS: Final = 5.0
"""How long the answer may take."""
_SILENT: Final = 2
"""So many questions without an answer, one after the other, and the connection is not believed in any more."""


async def watch(target: Target, name: str, every_seconds: float, returned: Callable[[Target], Awaitable[str]]) -> None:
    """Keep a target's ailment up to date, until cancelled.

    Args:
        target: which address.
        name: of the model, for the log.
        every_seconds: how often it is asked; at once when a call has found it unwell.
        returned: looks at one that is well again; gives what is wrong with it all the same, or nothing.

    Cancellation: at any checkpoint.
    """
    silent = 0
    while True:
        with trio.move_on_after(every_seconds):
            await target.suspect.wait()
            # What was found a moment ago would be found again.
            await trio.sleep(min(every_seconds, 1.0))
        target.suspect = trio.Event()
        before = target.ailment
        with trio.move_on_after(_ASK_SECONDS) as asking:
            target.ailment = await _ask(target, returned if before else None)
        silent = silent + 1 if asking.cancelled_caught else 0
        if asking.cancelled_caught:
            target.ailment = f"no answer within {_ASK_SECONDS:g} s"
        if silent >= _SILENT:
            target.endpoint.doubt()
        # Calls may have opened or closed its circuit since, too.
        readiness_may_have_changed()
        if bool(before) != bool(target.ailment):
            _tell(target, name)


async def _ask(target: Target, returned: Callable[[Target], Awaitable[str]] | None) -> str:
    try:
        ailment = await target.endpoint.ask_ready()
        return ailment or ("" if returned is None else await returned(target))
    except ServerError as error:
        return error.message


def _tell(target: Target, name: str) -> None:
    if target.ailment:
        log.warning("a remote model does not answer", name=name, at=target.endpoint.address, reason=target.ailment)
    else:
        log.info("a remote model answers again", name=name, at=target.endpoint.address)
