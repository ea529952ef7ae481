"""A pipeline as a servable, and what clients send to it as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.errors import Gathered
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.service import NOTHING_INSIDE, Inside
from ovmstrio.core.tensor import BY_NAME, Array, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.models.rejections import mismatch
from ovmstrio.models.tensor_contents import strings_of_rows
from ovmstrio.models.validation import Validator
from ovmstrio.pipelines.run import PipelineRun
from ovmstrio.pipelines.signatures import is_open

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import InferInput, InferRequest
    from ovmstrio.core.tensor import Datatype
    from ovmstrio.pipelines.custom_node import CustomNode
    from ovmstrio.pipelines.plan import NodePlan

__all__ = ["DagServable", "EntryReader"]

_PLATFORM = "OpenVINO"
_VERSION = "1"


class DagServable:
    """Validates requests, takes them through the pipeline, and names the outputs.

    ``entry`` is the node from which all that is called is linked; ``custom_nodes`` are closed with the pipeline,
    and ``inside`` is what it shows of itself.
    """

    def __init__(
        self,
        name: str,
        entry: NodePlan,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        custom_nodes: Sequence[CustomNode],
        *,
        inside: Inside = NOTHING_INSIDE,
    ) -> None:
        self.name = name
        self.metadata = ServableMetadata(name, _PLATFORM, inputs, outputs)
        self._entry = entry
        self._read = EntryReader(inputs)
        self._custom_nodes = custom_nodes
        self.inside = inside

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


class EntryReader:
    """Reads the requests of one pipeline, whose inputs may be open: whatever a graph behind them takes."""

    __slots__ = ("_specs", "_validate")

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in inputs}
        self._validate = None if any(map(is_open, inputs)) else Validator(inputs)

    def __call__(self, request: InferRequest) -> dict[str, Tensor]:
        """Give the inputs by name.

        Arrays are read-only views of the request's raw buffers where these are aligned.

        Raises:
            InvalidRequest: the request does not fit.
        """
        if self._validate is not None:
            return {
                name: Tensor(name, self._specs[name].datatype, array) for name, array in self._validate(request).items()
            }
        given = {each.name: each for each in request.inputs}
        specs: dict[str, TensorSpec] = {}
        wrong = Gathered()
        for name, spec in self._specs.items():
            with wrong:
                specs[name] = self._settle(spec, given.get(name))
        wrong.tell()
        arrays: dict[str, Array] = Validator(list(specs.values()))(request)
        return {name: Tensor(name, specs[name].datatype, array) for name, array in arrays.items()}

    def _settle(self, spec: TensorSpec, given: InferInput | None) -> TensorSpec:
        """Take an open input for what the client says it is."""
        if given is None or not is_open(spec):
            return spec
        datatype: Datatype | None = BY_NAME.get(given.datatype)
        if datatype is None:
            raise mismatch("Invalid input precision", f"one of {', '.join(BY_NAME)}", given.datatype, spec)
        return TensorSpec(spec.name, datatype, tuple(map(Dim.fixed, given.shape)), batch_axis=None)
