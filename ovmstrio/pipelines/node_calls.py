"""Calls of pipeline nodes: servables and custom nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from ovmstrio.core.errors import (
    CustomNodeFailure,
    GraphFailure,
    InvalidRequest,
    ModelFailure,
    NotFound,
    NotReady,
    PipelineFailure,
    ServerError,
)
from ovmstrio.core.hooks import NULL_NODE_HOOKS
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.service import NodeCounters
from ovmstrio.core.tensor import BY_NAME, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.core.tracing import child_span
from ovmstrio.encoding.raw_contents import buffer_of
from ovmstrio.models.validation import InputValidator

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ovmstrio.core.hooks import NodeHooks
    from ovmstrio.core.service import ServableLookup
    from ovmstrio.pipelines.custom_node import CustomNode

_ERRORS_WITH_NODE: Final = (InvalidRequest, ModelFailure, GraphFailure)


class NodeCall(Protocol):
    """The call of a node."""

    async def __call__(self, inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
        """Return the outputs by name; ``request`` is the pipeline's, for its id and deadline.

        Read-only input arrays are shared with other nodes.

        Raises:
            ServerError: the node failed, or the inputs do not fit.
        """
        ...


class MeasuredNodeCall:
    """Wrapper that counts and times the calls of a node.

    Args:
        node: the node's name.
        call: the wrapped call.
        hooks: observers of runs.

    Attributes:
        tally: the counters.
    """

    __slots__ = ("_call", "_node", "tally")

    def __init__(self, node: str, call: NodeCall, hooks: NodeHooks = NULL_NODE_HOOKS) -> None:
        self._node = node
        self._call = call
        self.tally = NodeCounters(hooks)

    async def __call__(self, inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
        """Call the node; see :class:`NodeCall`."""
        tally = self.tally
        begun = tally.begin()
        try:
            with child_span(f"node {self._node}"):
                outputs = await self._call(inputs, request)
        except Exception as error:
            tally.failed(begun)
            if isinstance(error, ServerError):
                error.node = self._node
            raise
        except BaseException:
            tally.left()
            raise
        tally.succeeded(begun)
        return outputs


class ServableCall:
    """Call of a servable, which is looked up and leased for each call."""

    __slots__ = ("_lease", "_node", "_servable", "_version")

    def __init__(self, lease: ServableLookup, node: str, servable: str, version: int) -> None:
        self._lease = lease
        self._node = node
        self._servable = servable
        self._version = str(version) if version else ""

    async def __call__(self, inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
        """Call the servable; see :class:`NodeCall`."""
        call = InferRequest(
            self._servable,
            self._version,
            request.id,
            {},
            [InferInput(name, tensor.datatype.name, tensor.array.shape) for name, tensor in inputs.items()],
            [],
            [buffer_of(tensor.array) for tensor in inputs.values()],
            request.deadline,
            keeps_rows=True,
            event=request.event,
            priority=request.priority,
        )
        try:
            with await self._lease(self._servable, self._version) as lease:
                response = await lease.servable.infer(call)
        except (NotFound, NotReady) as error:
            raise type(error)(f"{error.message}; node: {self._node}, which calls {self._servable!r}") from error
        except _ERRORS_WITH_NODE as error:
            kind = next(each for each in _ERRORS_WITH_NODE if isinstance(error, each))
            raise kind(f"{error.message}; node: {self._node}") from error
        return {
            output.name: output if isinstance(output, Tensor) else self._checked(output) for output in response.outputs
        }

    def _checked(self, output: RawTensor) -> Tensor:
        """Check an output that user code of a graph has created."""
        datatype = BY_NAME.get(output.datatype)
        if datatype is None:
            raise PipelineFailure(f"node {self._node!r}: output {output.name!r} has unknown type {output.datatype!r}")
        dims = tuple(map(Dim.fixed, output.shape))
        check = InputValidator(TensorSpec(output.name, datatype, dims, batch_axis=None))
        try:
            array = check(InferInput(output.name, output.datatype, output.shape), output.data)
        except InvalidRequest as error:
            raise PipelineFailure(f"node {self._node!r} returned an invalid tensor: {error.message}") from error
        return Tensor(output.name, datatype, array)


class CustomNodeCall:
    """Call of a custom node."""

    __slots__ = ("_library", "_node", "_wanted")

    def __init__(self, node: str, library: CustomNode, wanted: Iterable[str]) -> None:
        self._node = node
        self._library = library
        self._wanted = tuple(wanted)

    async def __call__(self, inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
        """Call the custom node; see :class:`NodeCall`."""
        del request
        results = await self._library.execute(
            {name: np.asarray(tensor.array, order="C") for name, tensor in inputs.items()}
        )
        missing = [name for name in self._wanted if name not in results]
        if missing:
            given = ", ".join(map(repr, results)) or "nothing"
            detail = f"custom node {self._node!r} did not return {missing[0]!r}; it returned {given}"
            raise CustomNodeFailure(f"{detail} (NODE_LIBRARY_MISSING_OUTPUT)")
        return {name: Tensor(name, _DATATYPES[results[name].dtype.str], results[name]) for name in self._wanted}


_DATATYPES = {datatype.numpy.str: datatype for datatype in BY_NAME.values() if datatype.name != "BF16"}
