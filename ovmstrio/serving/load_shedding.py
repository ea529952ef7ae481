"""Load shedding: refuses calls of a service without limits that would end after their clients have given up.

Without ``max_concurrency`` every call starts at once. Calls above the capacity wait inside the service, in the queues
of a model or as threads that share the cores. Soon every call takes longer than its client waits, and the service
computes responses that no client reads. Nothing is counted while clients get their responses in time::

    OFF ──> clients give up a fifth of the calls ──> SHEDDING ──> no refusal and no such client for 10 s ──> OFF
                                                         ├──> no such client for 30 s or a longer trial ──> OFF
                                                         └──> fewer responses than before ──> OFF, for a growing pause

A client that ends leaves all its calls at once, however long it would have waited. So given up calls must be spread
over time, and shedding ends after some time for a trial: if clients give up again, the next trial is later.

While shedding, a new call is refused if the calls in flight need more time than halfway from the fastest call to what
the client waits. That time is the number of calls in flight, divided by the calls that end per second (Little's law),
so the service needs no knowledge of queues inside.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from ovmstrio.core.errors import QueueTimeExceeded
from ovmstrio.util.backoff import Backoff

if TYPE_CHECKING:
    from ovmstrio.core.events import Interface

log = structlog.get_logger(__name__)

_GIVE_UPS: Final = 10
"""Given up calls after which their share is checked."""
_SHARE: Final = 0.2
_BURST_SECONDS: Final = 0.1
_BURSTS: Final = 5
"""Bursts of given up calls before their share is checked."""
_SPREAD: Final = 0.5
"""Least number of bursts, as a share of given up calls, or of the bursts that fit into the time if those are fewer."""
_MAX_WINDOW_SECONDS: Final = 10.0
_MIN_IN_FLIGHT: Final = 8
"""Calls that are never refused."""
_QUIET_SECONDS: Final = 10.0
"""Time without refusals and given up calls after which shedding ends."""
_FIRST_SHED_SECONDS: Final = 30.0
"""Time without given up calls after which shedding ends although calls are refused; later times are longer."""
_MAX_SHED_SECONDS: Final = 3600.0
_STABLE_SECONDS: Final = 300.0
"""Time without shedding after which it is short again."""
_TRIAL_SECONDS: Final = 5.0
"""Time of shedding after which the responses per second are compared with those before."""
_WORSE: Final = 0.7
_FIRST_PAUSE_SECONDS: Final = 60.0
_MAX_PAUSE_SECONDS: Final = 3600.0
_GAP_WEIGHT: Final = 0.05


class CallCounts(NamedTuple):
    """Calls of a service since the start: ended and succeeded ones, the number in flight now, and the shortest time."""

    ended: int
    succeeded: int
    in_flight: int
    fastest_seconds: float
    """Time of the fastest succeeded call; infinite without any."""


class LoadShedding:
    """Load shedding of one service; times are trio's.

    Attributes:
        is_active: calls may be refused, so that each call must be counted from its start to its end.
    """

    def __init__(self, name: str) -> None:
        self.is_active = False
        self._name = name
        # Times after which clients gave up, until shedding ends: later ones are longer, as threads that clients have
        # left must end first.
        self._patience: dict[Interface, list[float]] = {}
        # Share of given up calls
        self._window_start = -math.inf
        self._window_counts = CallCounts(0, 0, 0, math.inf)
        self._give_ups = 0
        self._bursts = 0
        self._burst_start = -math.inf
        # While shedding
        self._begun = self._last = self._gave_up_at = 0.0
        self._shed_seconds = 0.0
        self._ended_at = -math.inf
        self._older_calls = 0
        self._fastest = 0.0
        self._busy_since = 0.0  # when calls are in flight: the time since which no response was sent
        self._gap = math.inf  # average seconds between two responses in time while calls are in flight
        self._rate_before = 0.0
        self._trial_start = 0.0
        self._responses = self._refusals = 0
        self._paused_until = -math.inf
        self._backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
        self._shedding_times = Backoff(_FIRST_SHED_SECONDS, _MAX_SHED_SECONDS, _STABLE_SECONDS)

    def record_give_up(self, interface: Interface, seconds: float, counts: CallCounts, counted: int) -> None:
        """Record that a client has given up on a call after ``seconds``; ``counts`` include this call.

        A client that leaves before any call could end is no sign of overload. ``counted`` is the number of calls in
        flight that are counted from their start, as in :meth:`check`.
        """
        if seconds < counts.fastest_seconds:
            return
        now = trio.current_time()
        if not self.is_active and now - self._window_start > _MAX_WINDOW_SECONDS:
            self._window_start, self._window_counts = now, counts
            self._give_ups = self._bursts = 0
            self._patience.clear()
        known = self._patience.setdefault(interface, [])
        if len(known) < _GIVE_UPS:
            known.append(seconds)
        if self.is_active:
            self._last = self._gave_up_at = now
            return
        self._give_ups += 1
        if not self._bursts or now - self._burst_start >= _BURST_SECONDS:
            self._burst_start = now
            self._bursts += 1
        if self._give_ups < _GIVE_UPS or self._bursts < _BURSTS:
            return
        is_spread = self._bursts >= _SPREAD * min(self._give_ups, (now - self._window_start) / _BURST_SECONDS)
        is_common = self._give_ups >= _SHARE * (counts.ended - self._window_counts.ended)
        if is_spread and is_common and now > self._paused_until:
            self._begin(now, counts, counted)
        self._window_start = -math.inf

    def _begin(self, now: float, counts: CallCounts, counted: int) -> None:
        succeeded = counts.succeeded - self._window_counts.succeeded
        self._rate_before = succeeded / max(now - self._window_start, 1e-3)
        self._gap = 1 / self._rate_before if succeeded else math.inf
        self._older_calls = max(0, counts.in_flight - counted)
        self._begun = self._last = self._gave_up_at = self._busy_since = self._trial_start = now
        self._shed_seconds = self._shedding_times.seconds_after(now - self._ended_at)
        self._fastest = self._responses = self._refusals = 0
        self.is_active = True
        log.warning(
            "service overloaded: calls refused",
            name=self._name,
            given_up=self._give_ups,
            succeeded=succeeded,
            in_flight=counts.in_flight,
        )

    def check(self, interface: Interface, in_flight: int) -> float:
        """Check that one more call will probably end before its client gives up; ``in_flight`` calls run or wait.

        Returns:
            The time at which the client probably gives up.

        Raises:
            QueueTimeExceeded: the client will give up before.
        """
        now = trio.current_time()
        # HTTP has no deadlines of calls, but deadlines of connections.
        deadline = trio.current_effective_deadline() if interface == "gRPC" else math.inf
        patience = self._patience_of(interface) if deadline == math.inf else deadline - now
        if not in_flight:
            self._busy_since = now
        if in_flight < _MIN_IN_FLIGHT or self._expected_seconds(now, in_flight) <= (self._fastest + patience) / 2:
            return now + patience
        self._last = now
        self._refusals += 1
        # Half of the time that clients wait is the time that the calls under way need.
        again = max(1, math.ceil(patience / 2))
        raise QueueTimeExceeded(
            f'"{self._name}" is overloaded: {in_flight} calls are under way, so that a call would probably end'
            f" after its client has given up ({patience:.3g} s); try again in {again} s",
            retry_after_seconds=again,
        )

    def _patience_of(self, interface: Interface) -> float:
        """Return how long clients wait: the shortest known time but one, as some clients cancel early."""
        known = sorted(self._patience.get(interface, ()))
        return known[min(1, len(known) - 1)] if known else math.inf

    def _expected_seconds(self, now: float, in_flight: int) -> float:
        """Return the time from start to end of a call that starts now."""
        longest = max(map(self._patience_of, self._patience))
        # Calls that started before are not counted; they end while their clients wait.
        older = self._older_calls * max(0.0, 1 - (now - self._begun) / longest)
        return (in_flight + older) * self._gap

    def record_end(self, seconds: float, gives_up_at: float) -> None:
        """Record the end of a call that took ``seconds``; ``gives_up_at`` is the result of :meth:`check`."""
        now = trio.current_time()
        if now >= gives_up_at:
            return
        gap, self._busy_since = now - self._busy_since, now
        self._gap = gap if self._gap == math.inf else self._gap + _GAP_WEIGHT * (gap - self._gap)
        self._fastest = min(self._fastest or seconds, seconds)
        self._responses += 1

    def end_if_due(self) -> None:
        """End the shedding of load after a quiet time, or if it has no effect."""
        if not self.is_active:
            return
        now = trio.current_time()
        if now - self._last > _QUIET_SECONDS:
            self.is_active, self._ended_at = False, now
            self._backoff.reset()
            log.info("service not overloaded any more", name=self._name)
        elif now - self._gave_up_at > self._shed_seconds:
            self.is_active, self._ended_at = False, now
            log.info("load shedding ended for a trial: calls accepted again", name=self._name)
        elif (passed := now - self._trial_start) > _TRIAL_SECONDS:
            worst = _WORSE * self._rate_before * passed
            if self._responses < worst < self._responses + self._refusals:
                # Clients give up for another reason, such as a slow service that this one waits for.
                self.is_active, self._ended_at = False, now
                self._paused_until = now + self._backoff.seconds_after()
                log.warning("load shedding without effect: calls accepted again", name=self._name)
            self._trial_start, self._responses, self._refusals = now, 0, 0
