"""Number of replicas from queued requests; the only module that the Ray controller imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

DESIRED_REPLICAS: Final = "ovmstrio_wanted_replicas"
"""Metric of a replica: number of replicas that would keep its queues at their target."""


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the desired number of replicas, before Ray's limits and delays."""
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    by_queues = sum((context.aggregated_metrics or {}).get(DESIRED_REPLICAS, {}).values())
    return max(by_requests, by_queues), {}
