"""How calls find a replica of a group that has several: any that is free, or the one that has their stream."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from ray.serve.request_router import LocalityMixin, RequestRouter

from ovmstrio.cluster.ray.stream_keys import replica_of

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica

__all__ = ["StreamRouter"]

_PUSH: Final = "push_to_stream"


class StreamRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray is not there where types are checked
    """Takes the shorter queue of two, near ones first; Ray runs it wherever the group is called from."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Name the replicas of which the one with the shortest queue gets a call."""
        if pending_request is not None and pending_request.metadata.call_method == _PUSH:
            wanted = replica_of(pending_request.args[0])
            owner = [each for each in candidate_replicas if each.replica_id.unique_id == wanted]
            # Any other one says that it does not have the stream.
            return [owner or candidate_replicas[:1]]
        near = self.apply_locality_routing(pending_request=pending_request)
        chosen = random.sample(list(near), min(2, len(near)))
        return [[self.curr_replicas[each] for each in chosen if each in self.curr_replicas]]
