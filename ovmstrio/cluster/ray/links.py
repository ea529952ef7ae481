"""Calls of services in other groups through Ray handles.

Calls without user code are repeated after the loss of a replica; other calls fail.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import trio
from ray import exceptions as ray_errors
from ray.serve import exceptions as serve_errors

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.shards import shard_of
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import DeadlineExceeded, NotReady, NotSupported, Overloaded, PayloadTooLarge, ServerError
from ovmstrio.core.events import Door
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.tensor import BY_NAME, INVALID, Dim, TensorSpec
from ovmstrio.encoding.raw_contents import join_buffers
from ovmstrio.isolation.codec import decode_error
from ovmstrio.protocols.kserve.grpc_requests import decode_request
from ovmstrio.protocols.kserve.grpc_responses import encode_response
from ovmstrio.remote.grpc_endpoint import decode_response, encode_request
from ovmstrio.serving.data_plane import otherwise
from ovmstrio.serving.kind import Kind, Takes
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from ray.serve.handle import DeploymentHandle

    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.kind import LoadContext

__all__ = ["GroupLink", "LinkedKind", "LinkedSpec", "answer_linked", "describe_linked"]

# Calls

_REPLICA_LOST: Final = (ray_errors.RayActorError, ray_errors.ObjectLostError, serve_errors.DeploymentUnavailableError)
"""The replica is lost, or with its machine a large result stored there."""
_ATTEMPTS: Final = 5
_PAUSE_SECONDS: Final = 0.2


class GroupLink:
    """Connection to another group.

    Args:
        is_repeatable: whether calls with unknown outcome may be repeated.
    """

    def __init__(self, group: str, handle: DeploymentHandle, *, is_repeatable: bool) -> None:
        self._group = group
        self._handle = handle
        self._attempts = _ATTEMPTS if is_repeatable else 1

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of a replica.

        Raises:
            NotReady: there is no replica, or it was lost during the call.
            Overloaded: the queue is full.
            Exception: the call failed there.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._ask(method, *arguments, **options)
            except _REPLICA_LOST as error:
                if attempt == self._attempts:
                    raise self._lost(error) from None
                await asyncio.sleep(_PAUSE_SECONDS)
        raise AssertionError

    async def call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of a replica without repetition.

        Raises:
            Exception: as :meth:`call`.
        """
        try:
            return await self._ask(method, *arguments, **options)
        except _REPLICA_LOST as error:
            raise self._lost(error) from None

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        response = getattr(self._handle, method).remote(*arguments, **options)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except serve_errors.BackPressureError as error:
            raise Overloaded(f'group "{self._group}" is overloaded: {error.message}') from None

    def _lost(self, error: Exception) -> NotReady:
        return NotReady(f'group "{self._group}" lost the replica of this call: {_line(error)}')

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any]:
        """Call a streaming method of a replica.

        Raises:
            NotReady: there is no replica, or it was lost during the call.
            Exception: the call failed there.

        Cancellation: closing the iterator cancels the call there too.
        """
        response = getattr(self._handle.options(stream=True), method).remote(*arguments)
        try:
            async for each in response:
                yield each
        except _REPLICA_LOST as error:
            raise self._lost(error) from None
        finally:
            response.cancel()

    async def answer(self, method: str, *arguments: Any) -> Any:
        """Call a method that returns a success flag, and a result or an encoded error.

        Raises:
            ServerError: the call failed there, or as :meth:`call`.
        """
        succeeded, value = await self.call(method, *arguments)
        if succeeded:
            return value
        error = decode_error(value)
        raise error if isinstance(error, Exception) else ServerError(str(error))


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# Linked services

HANDLE: Final = Door("Cluster", "gRPC", infer="ModelInfer")
"""Interface of calls between groups."""

AskGroup = Callable[..., Awaitable[Any]]
"""Calls a method of a group by name; on the trio side."""


class LinkedSpec(ServableSpec):
    """A service of another group, possibly sharded."""

    kind: ClassVar[str] = "service of another group"

    group: str
    shards: int = 1


class LinkedServable:
    """Servable that calls a service of another group."""

    def __init__(self, spec: LinkedSpec, metadata: ServableMetadata, ask: AskGroup) -> None:
        self.metadata = metadata
        self._spec = spec
        self._ask = ask

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run the inference in the other group, within the request's deadline.

        Raises:
            ServerError: the call failed there, or the group cannot be reached.
            DeadlineExceeded: the response did not arrive in time.
        """
        group = shard_of(request, self._spec.group, self._spec.shards)
        data = join_buffers(encode_request(request, self._spec.name, request.model_version))
        seconds = request.deadline - trio.current_time()
        with trio.move_on_at(request.deadline):
            answer = await self._ask(group, "infer_linked", data, seconds)
            response = decode_response(bytearray(answer))
            if response.nbytes > request.most_bytes:
                raise PayloadTooLarge.of_outputs(response.nbytes, request.most_bytes)
            response.id = request.id
            return response
        raise DeadlineExceeded(f'deadline exceeded: "{self._spec.name}" of group "{self._spec.group}"')

    async def aclose(self) -> None:
        """Do nothing."""


class LinkedKind(Kind[LinkedSpec]):
    """Services of other groups."""

    name: ClassVar[str] = LinkedSpec.kind
    spec = LinkedSpec
    takes: ClassVar[frozenset[Takes]] = frozenset({Takes.TENSORS})
    runs_user_code = False

    def __init__(self, ask: AskGroup) -> None:
        self._ask = ask

    def list_versions(self, spec: LinkedSpec) -> Listing:
        """Return the only version, which stands for all."""
        return Listing({ONLY_VERSION: spec.base_path})

    def files_mark(self, spec: LinkedSpec, directory: Path) -> str:
        """Return an empty fingerprint: there are no local files."""
        del spec, directory
        return ""

    async def load(self, spec: LinkedSpec, version: int, directory: Path, context: LoadContext) -> LinkedServable:
        """Fetch the metadata of the service.

        Raises:
            ServerError: the call failed there, or the group cannot be reached.
        """
        del version, directory, context
        data = await self._ask(shard_names(spec.group, spec.shards)[0], "describe_linked", spec.name)
        return LinkedServable(spec, _decode_metadata(data), self._ask)


async def answer_linked(plane: DataPlane, data: bytes, seconds: float) -> bytes:
    """Answer an inference call of another group; raises ServerError as the data plane."""
    request = decode_request(data)
    if seconds != math.inf:
        request.deadline = trio.current_time() + seconds
    return await plane.infer(request, HANDLE, _render)


def _render(response: InferResponse) -> tuple[bytes, int]:
    written = encode_response(response)
    data = written.joined() if isinstance(written, PiecedMessage) else bytes(written)
    return data, len(data)


async def describe_linked(plane: DataPlane, name: str) -> list[Any]:
    """Return the metadata of a service as plain data; raises ServerError as the data plane."""
    with await plane.registry.lease(name) as lease:
        if Takes.TENSORS not in lease.takes:
            raise NotSupported(f"{otherwise(lease, 'calls from other groups')}, or place its callers in its group")
        metadata = lease.servable.metadata
    return [
        metadata.name,
        metadata.platform,
        [_encode_spec(each) for each in metadata.inputs],
        [_encode_spec(each) for each in metadata.outputs],
        list(metadata.labels),
    ]


def _encode_spec(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.datatype.name, [list(dim) for dim in spec.shape], spec.batch_axis, spec.layout]


def _decode_metadata(data: list[Any]) -> ServableMetadata:
    name, platform, inputs, outputs, labels = data
    return ServableMetadata(name, platform, _decode_specs(inputs), _decode_specs(outputs), labels=tuple(labels))


def _decode_specs(data: list[list[Any]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, BY_NAME.get(datatype, INVALID), tuple(Dim(*dim) for dim in shape), batch_axis, layout)
        for name, datatype, shape, batch_axis, layout in data
    )
