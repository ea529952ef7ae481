"""Time series of the last hour for the charts of the console, of fixed size: 2,880 bytes per series.

The server has eight series and each service with calls has six, 17 KiB; at most 200 services have some.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

STEP_SECONDS: Final = 5
POINTS: Final = 720
MAX_SERVICES: Final = 200

_SERVICE_FIGURES: Final = ("rate", "error_rate", "p50", "p90", "p99", "in_flight")
_SERVER_FIGURES: Final = (*_SERVICE_FIGURES, "cpu", "memory_bytes")


class TimeSeries:
    """Values of several figures per interval of five seconds, in rings of 4-byte floats; NaN where unknown."""

    def __init__(self, figures: Iterable[str]) -> None:
        self._rings = {name: array("f", [math.nan]) * POINTS for name in figures}
        self._last = 0  # Number of the newest interval since the epoch; 0 if empty.
        self._first = 0

    def add(self, interval: int, values: Mapping[str, float | None]) -> None:
        """Set the values of an interval, given by its number since the epoch; intervals in between stay unknown."""
        if interval <= self._last - POINTS:
            return
        if not self._last or interval >= self._last + POINTS:
            self._first = interval
        for skipped in range(max(self._last, interval - POINTS) + 1, interval + 1):
            for ring in self._rings.values():
                ring[skipped % POINTS] = math.nan
        for name, ring in self._rings.items():
            value = values.get(name)
            ring[interval % POINTS] = math.nan if value is None else value
        self._last = max(self._last, interval)
        self._first = max(min(self._first, interval), self._last - POINTS + 1)

    def forget_after(self, interval: int) -> None:
        """Remove the intervals after one, because the clock was set back to it."""
        if interval < self._first:
            self._last = self._first = 0
        self._last = min(self._last, interval)

    def document(self) -> dict[str, Any]:
        """Return the values, oldest first, and the end of the newest interval in seconds since the epoch."""
        known = range(self._first, self._last + 1) if self._last else range(0)
        return {
            "seconds": STEP_SECONDS,
            "end": (self._last + 1) * STEP_SECONDS if self._last else 0,
            "series": {
                name: [_rounded(ring[interval % POINTS]) for interval in known] for name, ring in self._rings.items()
            },
        }


def _rounded(value: float) -> float | None:
    if math.isnan(value):
        return None
    return round(value) if value >= 1e6 else round(value, 3)  # noqa: PLR2004 - bytes need no fractions


class SeriesHistory:
    """Series of the server and of the services that were called last."""

    def __init__(self) -> None:
        self._server = TimeSeries(_SERVER_FIGURES)
        self._newest = 0
        self._services: OrderedDict[str, TimeSeries] = OrderedDict()

    @property
    def services(self) -> list[str]:
        """Names of the services with series."""
        return list(self._services)

    def add(
        self, interval: int, totals: Mapping[str, float | None], services: Mapping[str, Mapping[str, float | None]]
    ) -> None:
        """Add the values of an interval; ``services`` has those with calls."""
        if interval < self._newest:
            for series in (self._server, *self._services.values()):
                series.forget_after(interval)
        self._newest = interval
        self._server.add(interval, totals)
        for name in services:
            self._series_of(name)
        for name, series in self._services.items():
            series.add(interval, services.get(name, _IDLE))

    def _series_of(self, name: str) -> TimeSeries:
        series = self._services.get(name)
        if series is None:
            series = self._services[name] = TimeSeries(_SERVICE_FIGURES)
            if len(self._services) > MAX_SERVICES:
                self._services.popitem(last=False)
        self._services.move_to_end(name)
        return series

    def document(self, service: str = "") -> dict[str, Any] | None:
        """Return the series of a service, or of the server; None for a service without calls."""
        series = self._services.get(service) if service else self._server
        return None if series is None else series.document()

    def load(self, service: str, document: Mapping[str, Any]) -> None:
        """Take over the series of another worker."""
        series = self._series_of(service) if service else self._server
        for interval, values in _points(document).items():
            series.add(interval, values)


_IDLE: Final = {"rate": 0.0, "error_rate": 0.0, "in_flight": 0.0}


def _points(document: Mapping[str, Any]) -> dict[int, dict[str, float | None]]:
    columns = document["series"]
    last = document["end"] // STEP_SECONDS - 1
    length = max(map(len, columns.values()), default=0)
    return {
        last - length + 1 + index: {name: values[index] for name, values in columns.items()} for index in range(length)
    }


def merge_series(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the series of several workers, each of which covers the whole server, as one."""
    points: dict[int, dict[str, float | None]] = {}
    for document in documents:
        for interval, values in _points(document).items():
            if points.get(interval, {}).get("rate") is None:
                points[interval] = values
    names = dict.fromkeys(name for each in documents for name in each["series"])
    merged = TimeSeries(names)
    for interval in sorted(points):
        merged.add(interval, points[interval])
    return merged.document()
