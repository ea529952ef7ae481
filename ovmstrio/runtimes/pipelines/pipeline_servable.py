"""A pipeline as a servable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.tensor import RawTensor, Tensor, TensorSpec
from ovmstrio.runtimes.models.strings import strings_of_rows
from ovmstrio.runtimes.pipelines.entry import EntryReader
from ovmstrio.runtimes.pipelines.pipeline_run import PipelineRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import CustomNode
    from ovmstrio.runtimes.pipelines.pipeline_plan import NodePlan

__all__ = ["DagServable"]

_PLATFORM = "OpenVINO"
_VERSION = "1"


class DagServable:
    """Validates requests, takes them through the pipeline, and names the outputs.

    ``entry`` is the node from which all that is called is linked; ``custom_nodes`` are closed with the pipeline.
    """

    def __init__(
        self,
        name: str,
        entry: NodePlan,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        custom_nodes: Sequence[CustomNode],
    ) -> None:
        self.name = name
        self.metadata = ServableMetadata(name, _PLATFORM, inputs, outputs)
        self._entry = entry
        self._read = EntryReader(inputs)
        self._custom_nodes = custom_nodes

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call with all outputs of the pipeline, in the order of their names.

        The caller owns the request, whose buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs, or what a node gave does not fit the next one.
            CustomNodeFailure: a custom node failed.
            PipelineFailure: what a node gave cannot be split or gathered.
            NothingToGather: a demultiplexer had nothing to split.
            ServerError: as the servables that the nodes call.

        Ownership: a nursery with all that runs for the call.
        Cancellation: at any checkpoint; everything that runs for the call is cancelled before this returns.
        """
        inputs = self._read(request)
        outputs = await PipelineRun(self._entry, request)(inputs)
        named: list[Tensor | RawTensor] = [
            _named(name, outputs[name], keeps_rows=request.keeps_rows) for name in sorted(outputs)
        ]
        return InferResponse(self.name, _VERSION, named, request.id)

    async def aclose(self) -> None:
        """Close the custom nodes.  Called once, when no call is in flight.

        Cancellation: shielded; each node bounds its own time.
        """
        with trio.CancelScope(shield=True):
            for node in reversed(self._custom_nodes):
                await node.aclose()


def _named(name: str, output: Tensor, *, keeps_rows: bool) -> Tensor:
    """Name an output; rows of bytes become strings if its name asks for it, be it the pipeline's or the node's own."""
    if keeps_rows:
        return Tensor(name, output.datatype, output.array)
    tensor = strings_of_rows(output)
    return strings_of_rows(Tensor(name, tensor.datatype, tensor.array))
