"""How many replicas a group should have, by its requests and by what waits in the queues of its servers.

::

    each replica: requests that wait / target_waiting_requests ──> Ray's controller: the sum of all replicas
                                                                       └── or ongoing / target_ongoing_requests, if more

Ray's controller imports this and nothing else of the server's; bounds and delays are Ray's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

__all__ = ["WANTED", "wanted_replicas"]

WANTED: Final = "ovmstrio_wanted_replicas"
"""What a replica reports: how many replicas its queues would keep at their target."""


def wanted_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Tell Ray how many replicas there should be, before its bounds and delays."""
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    by_queues = sum((context.aggregated_metrics or {}).get(WANTED, {}).values())
    return max(by_requests, by_queues), {}
