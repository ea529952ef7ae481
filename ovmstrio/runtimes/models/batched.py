"""One version of one OpenVINO model whose requests are joined: many callers, one inference.

Each request is checked by itself before it waits.  Requests of equal shapes, the batch axis apart, share an inference;
each caller gets the rows that are its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
import trio

from ovmstrio.config.specs import BatchingSpec, ModelSpec
from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.events import CallEvent
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.layer_times import LayerTimes
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.tensor import Array, TensorSpec
from ovmstrio.openvino.network import Network
from ovmstrio.runtimes.models.model import model_metadata, named_outputs
from ovmstrio.runtimes.models.validation import Validator
from ovmstrio.work.batching import Batcher, BatchOptions

__all__ = ["BatchedServable"]

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
