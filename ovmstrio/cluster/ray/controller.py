"""Number of replicas and stream keys; the only module that the Ray controller imports."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# ----------------------------------------------------------------------
# Number of replicas from queued requests
# ----------------------------------------------------------------------

DESIRED_REPLICAS: Final = "ovmstrio_desired_replicas"
"""Metric of a replica: number of replicas that would keep its queues at their target."""


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the desired number of replicas, before Ray's limits and delays."""
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    by_queues = sum((context.aggregated_metrics or {}).get(DESIRED_REPLICAS, {}).values())
    return max(by_requests, by_queues), {}


# ----------------------------------------------------------------------
# Stream keys, which contain the replica
# ----------------------------------------------------------------------


def make_key(replica: str) -> str:
    """Return a key for a new stream of a replica."""
    return f"{replica}:{uuid.uuid4().hex}"


def replica_of(key: str) -> str:
    """Return the replica of a stream."""
    return key.rpartition(":")[0]
