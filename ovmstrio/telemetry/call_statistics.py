"""Call statistics per version for KServe's and Triton's ``ModelStatistics``.

Independent of metrics, which may be disabled.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ovmstrio.core.events import OK, QUERY_METHODS
from ovmstrio.core.latency_histogram import HISTOGRAM_BOUNDS, empty_histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ovmstrio.core.events import CallEvent


@dataclass(slots=True)
class CallTotal:
    """Number of calls and their total time."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class VersionStatistics:
    """Calls of one version.

    ``queue``, ``compute`` and ``rest`` (parsing and encoding) split the time of successful calls.  ``times`` is a
    histogram of all calls with the bounds :data:`HISTOGRAM_BOUNDS`.  ``last_call`` is in seconds since the epoch,
    ``fastest_success`` the shortest time of a successful call in seconds.
    """

    success: CallTotal = field(default_factory=CallTotal)
    fail: CallTotal = field(default_factory=CallTotal)
    queue: CallTotal = field(default_factory=CallTotal)
    compute: CallTotal = field(default_factory=CallTotal)
    rest: CallTotal = field(default_factory=CallTotal)
    times: list[int] = field(default_factory=empty_histogram)
    last_call: float = 0.0
    fastest_success: float = math.inf


class CallStatistics:
    """Statistics of all called versions."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], VersionStatistics] = {}

    def of(self, names: Iterable[tuple[str, str]]) -> list[tuple[str, str, VersionStatistics]]:
        """Return statistics by name and version; zeros for versions without calls."""
        return [(name, version, self._versions.get((name, version)) or VersionStatistics()) for name, version in names]

    @property
    def versions(self) -> Mapping[tuple[str, str], VersionStatistics]:
        """Statistics of all called versions by name and version."""
        return self._versions

    def call_finished(self, event: CallEvent) -> None:
        """Count a call, but no query; written out, as this runs for every call."""
        if event.method in QUERY_METHODS:
            return
        key = (event.name, event.version)
        found = self._versions.get(key)
        if found is None:
            found = self._versions[key] = VersionStatistics()
        found.last_call = time.time()
        seconds, queued, computed = event.seconds, event.queue_seconds, event.compute_seconds
        total = found.success if event.code == OK else found.fail
        total.count += 1
        total.seconds += seconds
        found.times[bisect_left(HISTOGRAM_BOUNDS, seconds)] += 1
        if total is found.success:
            found.fastest_success = min(found.fastest_success, seconds)
            found.queue.count = found.compute.count = found.rest.count = total.count
            found.queue.seconds += queued
            found.compute.seconds += computed
            rest = seconds - queued - computed
            found.rest.seconds += rest if rest > 0 else 0.0
