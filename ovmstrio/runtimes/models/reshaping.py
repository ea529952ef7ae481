"""Models that follow the shapes of requests: ``batch_size`` or ``shape`` set to ``auto``.

A request of another shape makes the model load again, for that shape; everyone waits meanwhile, one load at a time.
If the model cannot take the shape, it goes on with the one that it had.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition
from ovmstrio.core.tensor import ANY_SIZE, Array, TensorSpec
from ovmstrio.openvino.network import Network

__all__ = ["NetworkSource", "check_auto", "follows_requests", "relaxed"]

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
