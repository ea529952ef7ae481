"""Calls of which more is said than which tensors they bring: inputs and outputs in shared memory, outputs, classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.dataplane.classification import keep_classes
from ovmstrio.dataplane.shared_memory.placed_tensors import place_tensors, write_outputs
from ovmstrio.dataplane.wanted_outputs import check_outputs, keep_outputs

if TYPE_CHECKING:
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.dataplane.shared_memory.client_regions import ClientRegions
    from ovmstrio.registry import Lease

__all__ = ["compute_as_said"]


async def compute_as_said(request: InferRequest, lease: Lease, regions: ClientRegions) -> InferResponse:
    """Have the service answer, and do what is said of the tensors.

    Raises:
        InvalidRequest: outputs are asked for that it has not, or parts of regions that there are not; before anything
            is computed.
        ServerError: whatever the service raised.

    Cancellation: as the service's; nothing is written into a region then.
    """
    if request.outputs:
        check_outputs(request.outputs, lease.servable.metadata.outputs)
    places = place_tensors(request, regions)
    answer = await lease.servable.infer(request)
    if request.outputs:
        keep_outputs(answer, request.outputs)
        keep_classes(answer, request.outputs, lease.servable.metadata.labels)
        await write_outputs(answer, places)
    return answer
