"""Servables of stateless OpenVINO models: direct, batched, or reshaped to the requests."""

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
from ovmstrio.models.tensor_contents import rows_to_strings
from ovmstrio.models.validation import Validator, validated
from ovmstrio.serving.batching import Batcher, BatchOptions

log = structlog.get_logger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def has_auto_shape(spec: ModelSpec) -> bool:
    """Return whether a shape or the batch size of the model is ``auto``."""
    batch_follows = spec.batch is not None and spec.batch.auto and not spec.shapes
    return batch_follows or any(shape.auto for shape in spec.shapes.values())


def relax_inputs(spec: ModelSpec, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return the inputs with any size in dimensions that are ``auto``."""
    return tuple(_relax(spec, tensor) for tensor in inputs)


def _relax(spec: ModelSpec, tensor: TensorSpec) -> TensorSpec:
    setting = spec.shapes.get(tensor.name) or spec.shapes.get("")
    dims = list(tensor.shape)
    if setting is not None and setting.auto:
        dims = [ANY_SIZE] * len(dims)
    elif not spec.shapes and spec.batch is not None and spec.batch.auto and tensor.batch_axis is not None:
        dims[tensor.batch_axis] = ANY_SIZE
    return TensorSpec(tensor.name, tensor.datatype, tuple(dims), tensor.batch_axis, tensor.layout)


class NetworkSource:
    """Network that is reloaded when the shapes of the inputs change."""

    def __init__(self, network: Network, load: Callable[[Shapes], Awaitable[Network]]) -> None:
        self.current = network
        self._load = load
        self._lock = trio.Lock()

    async def network_for(self, arrays: Mapping[str, Array]) -> Network:
        """Return a network for the shapes of the arrays; networks returned earlier stay usable.

        Raises:
            FailedPrecondition: the model cannot be reshaped; the current network stays.
        """
        async with self._lock:
            if not _accepts(self.current, arrays):
                self.current = await self._reload({name: array.shape for name, array in arrays.items()})
            return self.current

    async def _reload(self, shapes: Shapes) -> Network:
        log.info("reshaping model", shapes=dict(shapes))
        try:
            return await self._load(shapes)
        except ConfigError as error:
            raise FailedPrecondition(f"Model could not be reshaped with requested shape - {error.message}") from error


def _accepts(network: Network, arrays: Mapping[str, Array]) -> bool:
    return all(
        dim.accepts(size)
        for spec in network.signature.inputs
        for dim, size in zip(spec.shape, arrays[spec.name].shape, strict=True)
    )


def auto_shape_problem(inputs: tuple[TensorSpec, ...]) -> str:
    """Return the reason why the model cannot have automatic shapes; empty if it can."""
    scalars = [tensor.name for tensor in inputs if not tensor.shape]
    if scalars:
        return f"batch_size or shape auto: the input {scalars[0]!r} has no dimensions"
    return ""


# Servable

PLATFORM = "OpenVINO"


class NetworkServable:
    """Base of the servables that run one network."""

    def __init__(self, spec: ModelSpec, version: int, network: Network) -> None:
        self.name = spec.name
        self.version = str(version)
        self._network: Network | None = network

    @property
    def facts(self) -> dict[str, Any]:
        """Device and compilation settings; empty after close."""
        return {} if self._network is None else self._network.facts

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Measure the model's layers; see ``LayeredServable``."""
        if self._network is None:
            raise trio.ClosedResourceError
        return await self._network.layer_times(seconds)


class ModelServable(NetworkServable):
    """Servable that validates and runs requests one by one; ``source`` reshapes the model to the requests."""

    def __init__(self, spec: ModelSpec, version: int, network: Network, source: NetworkSource | None = None) -> None:
        super().__init__(spec, version, network)
        self._source = source
        inputs = network.signature.inputs
        self._validate = Validator(inputs if source is None else relax_inputs(spec, inputs))
        self._metadata = model_metadata(spec.name, network.signature)

    @property
    def metadata(self) -> ServableMetadata:
        """Inputs and outputs; current shapes if the model is reshaped to the requests."""
        if self._source is not None:
            return model_metadata(self.name, self._source.current.signature)
        return self._metadata

    @property
    def follows_requests(self) -> bool:
        """True if the model is reshaped to the requests."""
        return self._source is not None

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request; return all outputs of the model, sorted by name.

        The buffers of the request must not change until this returns.

        Raises:
            InvalidRequest: the request does not match the inputs.
            FailedPrecondition: the model cannot be reshaped to the request.
            ModelFailure: OpenVINO failed on a valid request.
        """
        check = self._validate
        arrays = await validated(check, request) if check.takes_strings else check(request)
        network = self._network
        if self._source is not None:
            network = await self._source.network_for(arrays)
        if network is None:
            raise trio.ClosedResourceError
        results = await network.infer(
            tuple(arrays.values()), event=request.event, max_output_bytes=request.max_output_bytes
        )
        outputs = named_outputs(network.signature, results, keeps_rows=request.keeps_rows)
        return InferResponse(self.name, self.version, outputs, request.id, is_private=True)

    async def aclose(self) -> None:
        """Unload the model; called once, with no call in flight. Never waits."""
        self._network = self._source = None


def model_metadata(name: str, signature: ModelSignature) -> ServableMetadata:
    """Return the metadata of a model."""
    extra = dict(signature.extra)
    return ServableMetadata(name, PLATFORM, signature.inputs, signature.outputs, extra, labels=signature.labels)


def named_outputs(
    signature: ModelSignature, arrays: Sequence[Array], *, keeps_rows: bool = False
) -> list[Tensor | RawTensor]:
    """Create the output tensors; convert byte matrices named ``..._string`` unless ``keeps_rows``."""
    outputs: list[Tensor | RawTensor] = []
    for spec, array in zip(signature.outputs, arrays, strict=True):
        tensor = Tensor(spec.name, spec.datatype, array)
        outputs.append(tensor if keeps_rows or spec.datatype is not UINT8 else rows_to_strings(tensor))
    return outputs


# Batched servable

_SHORT_STRING_BITS: Final = 10
"""Strings up to 2**10 - 1 bytes share a batch; longer ones only with strings of similar length."""


class _BatchItem(NamedTuple):
    arrays: tuple[Array, ...]
    rows: int
    event: CallEvent | None = None
    arrived: float = 0.0


class BatchedServable(NetworkServable):
    """Servable that validates requests one by one and runs them in batches, while :meth:`serve` runs."""

    def __init__(
        self,
        spec: ModelSpec,
        batching: BatchingSpec,
        version: int,
        network: Network,
        hooks: BatchHooks = NULL_BATCH_HOOKS,
    ) -> None:
        super().__init__(spec, version, network)
        self._signature = network.signature
        self._validate = Validator(network.signature.inputs)
        known = model_metadata(spec.name, network.signature)
        self.metadata: ServableMetadata = replace(known, joined_rows=batching.max_batch_size)
        self._axes = [tensor.batch_axis or 0 for tensor in network.signature.inputs]
        options = BatchOptions(
            batching.max_batch_size, batching.batch_timeout_ms / 1000, batching.max_queue_size, batching.eager
        )
        # No more batches than the pool can run: a batch that waits for the pool could not grow.
        self._batcher: Batcher[_BatchItem, list[Array]] = Batcher(
            self._run, options, concurrency=network.concurrency, retry_singly=True, hooks=hooks
        )

    @property
    def running(self) -> int:
        """Number of running batches."""
        return self._batcher.running

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the batches until the servable is closed."""
        await self._batcher.serve(task_status=task_status)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request in a batch; see :meth:`ModelServable.infer`.

        Raises:
            Overloaded: the queue is full.
            NotReady: the server is stopping.
            trio.ClosedResourceError: the servable is closed.

        Cancellation: removes a queued request, or drops its rows of a running batch.
        """
        check = self._validate
        arrays = tuple((await validated(check, request) if check.takes_strings else check(request)).values())
        counts = {array.shape[axis] for array, axis in zip(arrays, self._axes, strict=True)}
        rows = max(counts)
        # Inputs with different numbers of rows are not batched; the model validates them.
        key: Hashable = self._key(arrays) if len(counts) == 1 else object()
        outputs = await self._batcher.submit(
            _BatchItem(arrays, rows, request.event, perf_counter()),
            key=key,
            size=max(rows, 1),
            priority=request.priority,
        )
        return InferResponse(
            self.name, self.version, named_outputs(self._signature, outputs, keeps_rows=request.keeps_rows), request.id
        )

    async def aclose(self) -> None:
        """Unload the model; called once, with no call in flight. Waits for batches of cancelled calls."""
        await self._batcher.aclose()
        self._network = None

    def _key(self, arrays: Sequence[Array]) -> Hashable:
        return tuple(
            (*array.shape[:axis], *array.shape[axis + 1 :], _length_class(array))
            for array, axis in zip(arrays, self._axes, strict=True)
        )

    async def _run(self, requests: Sequence[_BatchItem]) -> list[list[Array] | Exception]:
        network = self._network
        if network is None:
            raise trio.ClosedResourceError
        started = perf_counter()
        for request in requests:
            if request.event is not None:
                request.event.queue_seconds += started - request.arrived
        if len(requests) == 1:
            return [await network.infer(requests[0].arrays, event=requests[0].event)]
        # No checkpoint before the copy: a cancelled caller may reuse its buffers.
        columns = zip(*(request.arrays for request in requests), strict=True)
        joined = [np.concatenate(column, axis) for column, axis in zip(columns, self._axes, strict=True)]
        outputs = await network.infer([np.ascontiguousarray(array) for array in joined])
        ends = list(accumulate(request.rows for request in requests))
        parts = [_split(array, tensor, ends) for array, tensor in zip(outputs, self._signature.outputs, strict=True)]
        return [list(own) for own in zip(*parts, strict=True)]


def _length_class(array: Array) -> int:
    """Return the size class of the longest string: OpenVINO pads all strings of a batch to the longest."""
    if array.dtype != BYTES.numpy:
        return 0
    longest = max(map(len, array.flat), default=0)
    return max(longest.bit_length(), _SHORT_STRING_BITS)


def _split(array: Array, tensor: TensorSpec, ends: Sequence[int]) -> list[Array]:
    axis = tensor.batch_axis or 0
    if array.ndim <= axis or array.shape[axis] != ends[-1]:
        raise ModelFailure(
            f"output {tensor.name!r} cannot be split among the requests of a batch: expected {ends[-1]} rows, "
            f"got shape {list(array.shape)}"
        )
    return [np.ascontiguousarray(part) for part in np.split(array, ends[:-1], axis)]
