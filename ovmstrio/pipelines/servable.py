"""A pipeline as a servable, and the parser of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.errors import ErrorList
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.service import NO_INTROSPECTION, Introspection
from ovmstrio.core.tensor import BY_NAME, Array, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.models.request_errors import input_mismatch
from ovmstrio.models.tensor_contents import rows_to_strings
from ovmstrio.models.validation import Validator
from ovmstrio.pipelines.run import PipelineRun
from ovmstrio.pipelines.signatures import is_open

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import InferInput, InferRequest
    from ovmstrio.core.tensor import Datatype
    from ovmstrio.pipelines.custom_node import CustomNode
    from ovmstrio.pipelines.plan import NodePlan

_PLATFORM = "OpenVINO"
_VERSION = "1"


class PipelineServable:
    """A loaded pipeline.

    ``entry`` links to all other nodes; ``custom_nodes`` are closed with the pipeline; ``inside`` is its introspection.
    """

    def __init__(
        self,
        name: str,
        entry: NodePlan,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        custom_nodes: Sequence[CustomNode],
        *,
        inside: Introspection = NO_INTROSPECTION,
    ) -> None:
        self.name = name
        self.metadata = ServableMetadata(name, _PLATFORM, inputs, outputs)
        self._entry = entry
        self._read = _RequestParser(inputs)
        self._custom_nodes = custom_nodes
        self.inside = inside

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run the pipeline and return all outputs in name order.

        The request's buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs, or a node's output does not fit the next node.
            CustomNodeFailure: a custom node failed.
            PipelineFailure: an output cannot be split or gathered.
            NothingToGather: a demultiplexer had nothing to split.
            ServerError: raised by a servable that a node calls.
        """
        inputs = self._read(request)
        outputs = await PipelineRun(self._entry, request)(inputs)
        named: list[Tensor | RawTensor] = [
            _named(name, outputs[name], keeps_rows=request.keeps_rows) for name in sorted(outputs)
        ]
        return InferResponse(self.name, _VERSION, named, request.id)

    async def aclose(self) -> None:
        """Close the custom nodes, shielded from cancellation. Called once, after the last call."""
        with trio.CancelScope(shield=True):
            for node in reversed(self._custom_nodes):
                await node.aclose()


def _named(name: str, output: Tensor, *, keeps_rows: bool) -> Tensor:
    """Rename an output; rows of bytes become strings if the pipeline's or the node's output name requires it."""
    if keeps_rows:
        return Tensor(name, output.datatype, output.array)
    tensor = rows_to_strings(output)
    return rows_to_strings(Tensor(name, tensor.datatype, tensor.array))


class _RequestParser:
    """Parser of one pipeline's requests; inputs of graphs are open: any datatype and shape."""

    __slots__ = ("_specs", "_validate")

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in inputs}
        self._validate = None if any(map(is_open, inputs)) else Validator(inputs)

    def __call__(self, request: InferRequest) -> dict[str, Tensor]:
        """Return the inputs by name. Arrays are read-only views of the request's raw buffers if these are aligned.

        Raises:
            InvalidRequest: the request does not fit the inputs.
        """
        if self._validate is not None:
            return {
                name: Tensor(name, self._specs[name].datatype, array) for name, array in self._validate(request).items()
            }
        given = {each.name: each for each in request.inputs}
        specs: dict[str, TensorSpec] = {}
        wrong = ErrorList()
        for name, spec in self._specs.items():
            with wrong:
                specs[name] = self._settle(spec, given.get(name))
        wrong.tell()
        arrays: dict[str, Array] = Validator(list(specs.values()))(request)
        return {name: Tensor(name, specs[name].datatype, array) for name, array in arrays.items()}

    def _settle(self, spec: TensorSpec, given: InferInput | None) -> TensorSpec:
        if given is None or not is_open(spec):
            return spec
        datatype: Datatype | None = BY_NAME.get(given.datatype)
        if datatype is None:
            raise input_mismatch("Invalid input precision", f"one of {', '.join(BY_NAME)}", given.datatype, spec)
        return TensorSpec(spec.name, datatype, tuple(map(Dim.fixed, given.shape)), batch_axis=None)
