"""What the system tells of the server's process, under the names that Prometheus's own libraries use."""

from __future__ import annotations

from time import process_time
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ovmstrio.observability.resident_memory import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ovmstrio.core.metric_families import Family

__all__ = ["PROCESS_FIGURES", "ProcessFigure"]

PROCESS_FIGURES: Final[Mapping[str, Callable[[], float]]] = {
    "process_resident_memory_bytes": resident_bytes,
    "process_cpu_seconds": process_time,
}
"""What is read whenever somebody scrapes, by family."""


class ProcessFigure:
    """A family of one figure, as a collector."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._read = PROCESS_FIGURES[family.name]

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Tell the family's name, for which it answers."""
        return self.collect()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Give the figure of the moment."""
        made = CounterMetricFamily if self._family.kind == "counter" else GaugeMetricFamily
        return (made(self._family.name, self._family.help, self._read()),)
