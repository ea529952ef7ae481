"""One version of one OpenVINO model, without state, as a servable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
import structlog
import trio

from ovmstrio.config.specs import BatchingSpec, ModelSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, ModelFailure
from ovmstrio.core.events import CallEvent
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.service import LayerTimes
from ovmstrio.core.tensor import ANY_SIZE, BYTES, UINT8, Array, RawTensor, Tensor, TensorSpec
from ovmstrio.inference.network import Network
from ovmstrio.inference.signature import ModelSignature
from ovmstrio.models.tensor_contents import strings_of_rows
from ovmstrio.models.validation import Validator
from ovmstrio.serving.batching import Batcher, BatchOptions

__all__ = [
    "PLATFORM",
    "BatchedServable",
    "ModelServable",
    "NetworkSource",
    "check_auto",
    "follows_requests",
    "model_metadata",
    "named_outputs",
    "relaxed",
]

# ----------------------------------------------------------------------
# Models that follow the shapes of requests: ``batch_size`` or ``shape`` set to ``auto``
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def follows_requests(spec: ModelSpec) -> bool:
    """Tell whether a shape or the batch size of the model is ``auto``."""
    batch_follows = spec.batch is not None and spec.batch.auto and not spec.shapes
    return batch_follows or any(shape.auto for shape in spec.shapes.values())


def relaxed(spec: ModelSpec, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Give the inputs as requests may send them: any size where the model follows the request."""
    return tuple(_relaxed(spec, tensor) for tensor in inputs)


def _relaxed(spec: ModelSpec, tensor: TensorSpec) -> TensorSpec:
    setting = spec.shapes.get(tensor.name) or spec.shapes.get("")
    dims = list(tensor.shape)
    if setting is not None and setting.auto:
        dims = [ANY_SIZE] * len(dims)
    elif not spec.shapes and spec.batch is not None and spec.batch.auto and tensor.batch_axis is not None:
        dims[tensor.batch_axis] = ANY_SIZE
    return TensorSpec(tensor.name, tensor.datatype, tuple(dims), tensor.batch_axis, tensor.layout)


class NetworkSource:
    """Gives a network that accepts given arrays, loading one where the current one does not."""

    def __init__(self, network: Network, load: Callable[[Shapes], Awaitable[Network]]) -> None:
        self.current = network
        self._load = load
        self._turn = trio.Lock()

    async def fitting(self, arrays: Mapping[str, Array]) -> Network:
        """Give a network for these arrays; it stays usable for whoever has it, though another may replace it here.

        Raises:
            FailedPrecondition: the model cannot take these shapes; the one before stays in place.

        Cancellation: at once; a load that has begun is dropped.
        """
        async with self._turn:
            if not _fits(self.current, arrays):
                self.current = await self._reload({name: array.shape for name, array in arrays.items()})
            return self.current

    async def _reload(self, shapes: Shapes) -> Network:
        log.info("reshaping model", shapes=dict(shapes))
        try:
            return await self._load(shapes)
        except ConfigError as error:
            raise FailedPrecondition(f"Model could not be reshaped with requested shape - {error.message}") from error


def _fits(network: Network, arrays: Mapping[str, Array]) -> bool:
    return all(
        dim.accepts(size)
        for spec in network.signature.inputs
        for dim, size in zip(spec.shape, arrays[spec.name].shape, strict=True)
    )


def check_auto(inputs: tuple[TensorSpec, ...]) -> str:
    """Tell why the model cannot follow requests, in words; empty if it can."""
    scalars = [tensor.name for tensor in inputs if not tensor.shape]
    if scalars:
        return f"batch_size or shape auto is not for inputs without dimensions, such as {scalars[0]!r}"
    return ""


# ----------------------------------------------------------------------
# One version of one OpenVINO model, without state, as a servable
# ----------------------------------------------------------------------

PLATFORM = "OpenVINO"


class ModelServable:
    """Validates requests, runs them, and names the outputs.

    ``source`` gives networks of other shapes, for a model that follows its requests.
    """

    def __init__(self, spec: ModelSpec, version: int, network: Network, source: NetworkSource | None = None) -> None:
        self.name = spec.name
        self.version = str(version)
        self._network: Network | None = network
        self._source = source
        inputs = network.signature.inputs
        self._validate = Validator(inputs if source is None else relaxed(spec, inputs))
        self._metadata = model_metadata(spec.name, network.signature)

    @property
    def metadata(self) -> ServableMetadata:
        """Inputs and outputs; of a model that follows its requests, those of the moment."""
        if self._source is not None:
            return model_metadata(self.name, self._source.current.signature)
        return self._metadata

    @property
    def follows_requests(self) -> bool:
        """Whether the model is reshaped to whatever a request brings."""
        return self._source is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What it was compiled to, for those who look; nothing once it is closed."""
        return {} if self._network is None else self._network.facts

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call with all outputs of the model, in the order of their names.

        The caller owns the request, whose buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs.
            FailedPrecondition: a model that follows its requests cannot take the shape.
            ModelFailure: OpenVINO failed on a valid request.

        Cancellation: see :meth:`Network.infer`; requests of the pool are given back.
        """
        arrays = self._validate(request)
        network = self._network
        if self._source is not None:
            network = await self._source.fitting(arrays)
        if network is None:
            raise trio.ClosedResourceError
        results = await network.infer(tuple(arrays.values()), event=request.event, most_bytes=request.most_bytes)
        outputs = named_outputs(network.signature, results, keeps_rows=request.keeps_rows)
        return InferResponse(self.name, self.version, outputs, request.id, is_private=True)

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Time the model's layers; see ``LayeredServable``."""
        if self._network is None:
            raise trio.ClosedResourceError
        return await self._network.layer_times(seconds)

    async def aclose(self) -> None:
        """Unload the model.  Called once, when no call is in flight.

        Cancellation: never; it does not wait.
        """
        self._network = self._source = None


def model_metadata(name: str, signature: ModelSignature) -> ServableMetadata:
    """Describe a model as its servables do."""
    extra = dict(signature.extra)
    return ServableMetadata(name, PLATFORM, signature.inputs, signature.outputs, extra, labels=signature.labels)


def named_outputs(
    signature: ModelSignature, arrays: Sequence[Array], *, keeps_rows: bool = False
) -> list[Tensor | RawTensor]:
    """Name the outputs of one inference, and give strings where the name asks for them, unless rows are to be kept."""
    outputs: list[Tensor | RawTensor] = []
    for spec, array in zip(signature.outputs, arrays, strict=True):
        tensor = Tensor(spec.name, spec.datatype, array)
        outputs.append(tensor if keeps_rows or spec.datatype is not UINT8 else strings_of_rows(tensor))
    return outputs


# ----------------------------------------------------------------------
# One version of one OpenVINO model whose requests are joined: many callers, one inference
# ----------------------------------------------------------------------

_SHORT_STRING_BITS: Final = 10
"""Strings whose length has no more bits share an inference with each other, longer ones with their like."""


class _Joinable(NamedTuple):
    """The inputs of one request, how many rows they have, and what observers see of the call."""

    arrays: tuple[Array, ...]
    rows: int
    event: CallEvent | None = None
    arrived: float = 0.0


class BatchedServable:
    """Validates requests one by one, runs them together, and names each caller's rows of the outputs.

    Batches run while :meth:`serve` does.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batching: BatchingSpec,
        version: int,
        network: Network,
        hooks: BatchHooks = NULL_BATCH_HOOKS,
    ) -> None:
        self.name = spec.name
        self.version = str(version)
        self._network: Network | None = network
        self._signature = network.signature
        self._validate = Validator(network.signature.inputs)
        known = model_metadata(spec.name, network.signature)
        self.metadata: ServableMetadata = replace(known, joined_rows=batching.max_batch_size)
        self._axes = [tensor.batch_axis or 0 for tensor in network.signature.inputs]
        options = BatchOptions(
            batching.max_batch_size, batching.batch_timeout_ms / 1000, batching.max_queue_size, batching.eager
        )
        # A batch that had to wait for the pool could not grow any more, so no more run than there is room for.
        self._batcher: Batcher[_Joinable, list[Array]] = Batcher(
            self._run, options, concurrency=network.side_by_side, retry_singly=True, hooks=hooks
        )

    @property
    def running(self) -> int:
        """How many batches run."""
        return self._batcher.running

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the batches until the servable is closed.

        Cancellation: see :meth:`Batcher.serve`.
        """
        await self._batcher.serve(task_status=task_status)

    @property
    def facts(self) -> dict[str, Any]:
        """What it was compiled to, for those who look; nothing once it is closed."""
        return {} if self._network is None else self._network.facts

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call with all outputs of the model, in the order of their names, whichever were asked for.

        The caller owns the request, whose buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs.
            Overloaded: too many requests wait for their batch.
            ModelFailure: OpenVINO failed on this request.
            NotReady: the server stops.
            trio.ClosedResourceError: the servable has been closed.

        Cancellation: while the request waits, which takes it away; while its batch runs, which drops its rows.
        """
        arrays = tuple(self._validate(request).values())
        counts = {array.shape[axis] for array, axis in zip(arrays, self._axes, strict=True)}
        rows = max(counts)
        # Inputs of different numbers of rows are for the model to judge, with nobody else's beside them.
        key: Hashable = self._key(arrays) if len(counts) == 1 else object()
        outputs = await self._batcher.submit(
            _Joinable(arrays, rows, request.event, perf_counter()), key=key, size=max(rows, 1)
        )
        return InferResponse(
            self.name, self.version, named_outputs(self._signature, outputs, keeps_rows=request.keeps_rows), request.id
        )

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Time the model's layers; see ``LayeredServable``."""
        if self._network is None:
            raise trio.ClosedResourceError
        return await self._network.layer_times(seconds)

    async def aclose(self) -> None:
        """Unload the model.  Called once, when no call is in flight.

        Cancellation: while batches run whose callers have gone.
        """
        await self._batcher.aclose()
        self._network = None

    def _key(self, arrays: Sequence[Array]) -> Hashable:
        """Tell requests apart that cannot be joined; their datatypes have been checked."""
        return tuple(
            (*array.shape[:axis], *array.shape[axis + 1 :], _length_class(array))
            for array, axis in zip(arrays, self._axes, strict=True)
        )

    async def _run(self, requests: Sequence[_Joinable]) -> list[list[Array] | Exception]:
        network = self._network
        if network is None:
            raise trio.ClosedResourceError
        begun = perf_counter()
        for request in requests:
            if request.event is not None:
                request.event.queue_seconds += begun - request.arrived
        if len(requests) == 1:
            return [await network.infer(requests[0].arrays, event=requests[0].event)]
        # Nothing waits before the copy is made: the buffers of a caller that leaves are its own again.
        columns = zip(*(request.arrays for request in requests), strict=True)
        joined = [np.concatenate(column, axis) for column, axis in zip(columns, self._axes, strict=True)]
        outputs = await network.infer([np.ascontiguousarray(array) for array in joined])
        ends = list(accumulate(request.rows for request in requests))
        parts = [_split(array, tensor, ends) for array, tensor in zip(outputs, self._signature.outputs, strict=True)]
        return [list(own) for own in zip(*parts, strict=True)]


def _length_class(array: Array) -> int:
    """Tell roughly how long the longest string is, as OpenVINO is given all of a batch at the length of the longest."""
    if array.dtype != BYTES.numpy:
        return 0
    longest = max(map(len, array.flat), default=0)
    return max(longest.bit_length(), _SHORT_STRING_BITS)


def _split(array: Array, tensor: TensorSpec, ends: Sequence[int]) -> list[Array]:
    axis = tensor.batch_axis or 0
    if array.ndim <= axis or array.shape[axis] != ends[-1]:
        raise ModelFailure(
            f"output {tensor.name!r} cannot be divided among the requests of a batch: expected {ends[-1]} rows, "
            f"found the shape {list(array.shape)}"
        )
    return [np.ascontiguousarray(part) for part in np.split(array, ends[:-1], axis)]
