"""Addresses of a remote model: sequence affinity, circuit breakers, choice of the next address and health checks."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import SEQUENCE_CONTROL, SEQUENCE_ID
from ovmstrio.core.service import notify_readiness_changed
from ovmstrio.core.tensor import RawTensor
from ovmstrio.models.sequences.requests import read_control

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.remote.endpoint import Endpoint

# ----------------------------------------------------------------------
# Sequence steps
# ----------------------------------------------------------------------

_START: Final = "sequence_start"


class SequenceStep(NamedTuple):
    """Sequence parameters of a request; id 0 lets the server choose an id."""

    id: int | str
    starts: bool
    ends: bool


def sequence_step(request: InferRequest) -> SequenceStep | None:
    """Return a request's sequence parameters, or None; invalid ones are left to the remote server's validation."""
    named = SEQUENCE_ID in request.parameters or _START in request.parameters
    if not named and not any(given.name in {SEQUENCE_ID, SEQUENCE_CONTROL} for given in request.inputs):
        return None
    with suppress(ServerError):
        control, _ = read_control(request)
        return SequenceStep(control.id, control.start, control.end)
    return SequenceStep(0, starts=False, ends=False)


def server_sequence_id(response: InferResponse) -> int | str:
    """Return the sequence id that the server chose, 0 if none."""
    details = response.parameters.get(SEQUENCE_ID, 0)
    if isinstance(details, int | str) and details:
        return details
    for output in response.outputs:
        if output.name == SEQUENCE_ID:
            raw = output.data if isinstance(output, RawTensor) else output.array.tobytes()
            return int.from_bytes(raw, "little")
    return 0


# Circuit breaker


class CircuitBreaker:
    """Circuit breaker of one address, opened by ``failures`` consecutive failures, 0 for never.

    After ``open_seconds`` a single call may probe the address.  Callers pass the time.
    """

    __slots__ = ("_failures", "_in_row", "_is_trying", "_open_seconds", "_opened")

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._failures = failures
        self._open_seconds = open_seconds
        self._in_row = 0
        self._opened: float | None = None
        self._is_trying = False

    @property
    def consecutive_failures(self) -> int:
        """Number of consecutive failures."""
        return self._in_row

    def seconds_left(self, now: float) -> float:
        """Return the remaining seconds of an open circuit; 0 if closed or due for a probe."""
        return 0.0 if self._opened is None else max(0.0, self._opened + self._open_seconds - now)

    def allows(self, now: float) -> bool:
        """Return whether a call may be made."""
        if self._opened is None:
            return True
        return not self._is_trying and now >= self._opened + self._open_seconds

    def begin(self) -> None:
        """Record an allowed call; in an open circuit it is the only probe."""
        self._is_trying = self._opened is not None

    def succeed(self) -> None:
        """Record a success and close the circuit."""
        self._in_row = 0
        self._opened = None
        self._is_trying = False

    def fail(self, now: float) -> None:
        """Record a failure."""
        self._in_row += 1
        if self._is_trying or (self._failures and self._in_row >= self._failures):
            self._opened = now
        self._is_trying = False

    def abandon(self) -> None:
        """Record a call without a result for the address; another call may probe."""
        self._is_trying = False


# Targets

_MAX_DEVIATIONS: Final = 65_536
"""Most remembered sequences on another address than their hash selects; the oldest are dropped."""


class Target:
    """Address with its state.

    Attributes:
        endpoint: client of the address.
        breaker: circuit breaker.
        failure_reason: known reason why the address does not answer; empty if healthy.
        suspect: set when a call found a failure.
    """

    __slots__ = ("breaker", "endpoint", "failure_reason", "suspect")

    def __init__(self, endpoint: Endpoint, breaker: CircuitBreaker) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        self.failure_reason = ""
        self.suspect = trio.Event()

    def unready_reason(self, now: float) -> str:
        """Return why the address cannot be called; empty if it can."""
        if self.failure_reason:
            return f"{self.endpoint.address}: {self.failure_reason}"
        left = self.breaker.seconds_left(now)
        if not left:
            return ""
        failures = self.breaker.consecutive_failures
        return f"{self.endpoint.address}: circuit open for {left:.1f} s after {failures} consecutive failures"


class Targets:
    """Addresses of one model."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.all = tuple(targets)
        self._next_index = 0
        self._deviations: OrderedDict[int | str, Target] = OrderedDict()

    def unready_reason(self, now: float) -> str:
        """Return why no address can be called; empty if one can."""
        obstacles = [target.unready_reason(now) for target in self.all]
        return "; ".join(obstacles) if all(obstacles) else ""

    def choose(self, now: float, tried: Collection[Target] = ()) -> Target | None:
        """Return the next allowed untried address, round-robin; healthy addresses come first."""
        first = self._next_index % len(self.all)
        # Only the first attempt of a call advances the round-robin.
        self._next_index += not tried
        in_turn = (*self.all[first:], *self.all[:first])
        allowed = [target for target in in_turn if target not in tried and target.breaker.allows(now)]
        return min(allowed, key=lambda target: bool(target.failure_reason), default=None)

    def target_of_sequence(self, step: SequenceStep, now: float) -> Target:
        """Return the address of a sequence; a new sequence goes to a healthy address.

        A hash of the id selects the address, so that most sequences need no memory and survive a restart of the server.
        Sequences that started on another address are remembered.
        """
        own = max(self.all, key=lambda target: _weight(step.id, target))
        if not step.starts:
            return self._deviations.get(step.id, own)
        healthy = [target for target in self.all if not target.failure_reason and target.breaker.allows(now)]
        target = max(healthy, key=lambda target: _weight(step.id, target)) if healthy else own
        self.place(step.id, target)
        return target

    def place(self, sequence: int | str, target: Target) -> None:
        """Record the address of a sequence."""
        self.forget(sequence)
        if target is not max(self.all, key=lambda each: _weight(sequence, each)):
            self._deviations[sequence] = target
            if len(self._deviations) > _MAX_DEVIATIONS:
                self._deviations.popitem(last=False)

    def forget(self, sequence: int | str) -> None:
        """Drop the address of an ended sequence."""
        self._deviations.pop(sequence, None)


def _weight(sequence: int | str, target: Target) -> bytes:
    return blake2b(f"{sequence}@{target.endpoint.address}".encode(), digest_size=8).digest()


# Health checks

log = structlog.get_logger(__name__)

_HEALTH_CHECK_SECONDS: Final = 5.0
"""Time limit of a health check."""
_MAX_SILENT_CHECKS: Final = 2
"""Consecutive health check timeouts after which the connection is closed."""


async def watch_health(
    target: Target, name: str, every_seconds: float, returned: Callable[[Target], Awaitable[str]]
) -> None:
    """Update a target's health every ``every_seconds``, and soon after a failed call, until cancelled.

    ``returned`` returns the problem of a recovered address, empty for none.
    """
    silent = 0
    while True:
        with trio.move_on_after(every_seconds):
            await target.suspect.wait()
            # The state right after a failed call would be the same.
            await trio.sleep(min(every_seconds, 1.0))
        target.suspect = trio.Event()
        before = target.failure_reason
        with trio.move_on_after(_HEALTH_CHECK_SECONDS) as asking:
            target.failure_reason = await _check_health(target, returned if before else None)
        silent = silent + 1 if asking.cancelled_caught else 0
        if asking.cancelled_caught:
            target.failure_reason = f"no answer within {_HEALTH_CHECK_SECONDS:g} s"
        if silent >= _MAX_SILENT_CHECKS:
            target.endpoint.doubt()
        # Calls may also have opened or closed the circuit.
        notify_readiness_changed()
        if bool(before) != bool(target.failure_reason):
            if target.failure_reason:
                log.warning(
                    "remote model unavailable", name=name, at=target.endpoint.address, reason=target.failure_reason
                )
            else:
                log.info("remote model available again", name=name, at=target.endpoint.address)


async def _check_health(target: Target, returned: Callable[[Target], Awaitable[str]] | None) -> str:
    try:
        failure_reason = await target.endpoint.unready_reason()
        return failure_reason or ("" if returned is None else await returned(target))
    except ServerError as error:
        return error.message
