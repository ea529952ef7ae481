"""How many replicas a group wants: by its requests, and by what waits in its servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ovmstrio.cluster.ray.autoscaling import WANTED, wanted_replicas
from ovmstrio.cluster.ray.group_server import WAITING, total_of
from ovmstrio.observability.metrics import Metrics


def _context(ongoing: float, metrics: Any) -> Any:
    config = SimpleNamespace(target_ongoing_requests=8.0)
    return SimpleNamespace(total_num_requests=ongoing, config=config, aggregated_metrics=metrics)


def test_the_larger_of_both_numbers_counts() -> None:
    """Many requests of which none waits want replicas, and so do few that wait."""
    assert wanted_replicas(_context(32.0, {WANTED: {"a": 0.5, "b": 0.25}})) == (4.0, {})
    assert wanted_replicas(_context(8.0, {WANTED: {"a": 2.5, "b": 0.5}})) == (3.0, {})


def test_replicas_that_report_nothing_are_counted_by_their_requests() -> None:
    """As one that has just begun."""
    assert wanted_replicas(_context(16.0, {})) == (2.0, {})
    assert wanted_replicas(_context(16.0, None)) == (2.0, {})


def test_what_waits_is_the_sum_over_all_services() -> None:
    """And nothing that is under way is in it."""
    metrics = Metrics()
    metrics.limited("a", lambda: 2)
    metrics.limited("b", lambda: 3)
    metrics.show("ovmstrio_batch_queued_requests", lambda: {("a",): 4})
    metrics.show("ovmstrio_worker_threads", lambda: {("a",): 7})
    assert total_of(metrics.render(WAITING)) == 9
