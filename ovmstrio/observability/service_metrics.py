"""Families of metrics that services count themselves, together, as scrapers want them: each family once."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from ovmstrio.observability.vllm_names import with_vllm_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ovmstrio.core.hooks import Collectors

__all__ = ["ServiceMetrics"]


class ServiceMetrics:
    """A collector of the collectors of services, which come and go.

    Args:
        has_vllm_names: whether it gives what vLLM has under vLLM's names as well.
    """

    def __init__(self, *, has_vllm_names: bool = False) -> None:
        self._has_vllm_names = has_vllm_names
        self._services: list[tuple[str, Collectors]] = []

    @contextmanager
    def collecting(self, collectors: Collectors, name: str) -> Iterator[None]:
        """Show what the collectors give while the block lasts, with the label ``name`` unless that is empty."""
        entry = name, collectors
        self._services.append(entry)
        try:
            yield
        finally:
            self._services.remove(entry)

    def collect(self) -> Iterable[Metric]:
        """Give each family with the samples of all services."""
        families: dict[str, Metric] = {}
        for name, collectors in tuple(self._services):
            labels = {"name": name} if name else {}
            for found in (family for collector in collectors for family in collector.collect()):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                family.samples += [each._replace(labels=labels | each.labels) for each in found.samples]
        return with_vllm_names(families.values()) if self._has_vllm_names else families.values()

    def restricted(self, families: Sequence[str]) -> RestrictedServiceMetrics:
        """Give the families of these names, or that have samples so called."""
        return RestrictedServiceMetrics(self, families)


class RestrictedServiceMetrics:
    """A collector of some families of services, which nobody knows by name before they are collected."""

    def __init__(self, metrics: ServiceMetrics, families: Sequence[str]) -> None:
        self._metrics = metrics
        self._families = frozenset(families)

    def collect(self) -> Iterable[Metric]:
        """Give them."""
        for family in self._metrics.collect():
            if {family.name, f"{family.name}_total"} & self._families:
                yield family
