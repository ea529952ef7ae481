"""Services of other groups as services of this server, without Ray."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import trio

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.routing import shard_of
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import DeadlineExceeded, NotSupported, PayloadTooLarge
from ovmstrio.core.events import ApiInterface
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.tensor import BY_NAME, INVALID, Dim, TensorSpec
from ovmstrio.encoding.raw_contents import join_buffers
from ovmstrio.protocols.kserve.grpc_messages import decode_request, encode_response
from ovmstrio.remote.grpc_endpoint import decode_response, encode_request
from ovmstrio.serving.data_plane import unsupported_call_message
from ovmstrio.serving.kind import CallType, Kind
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.kind import LoadContext

CLUSTER_INTERFACE: Final = ApiInterface("Cluster", "gRPC", infer="ModelInfer")
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
            if response.nbytes > request.max_output_bytes:
                raise PayloadTooLarge.of_outputs(response.nbytes, request.max_output_bytes)
            response.id = request.id
            return response
        raise DeadlineExceeded(f'deadline exceeded: "{self._spec.name}" of group "{self._spec.group}"')

    async def aclose(self) -> None:
        """Do nothing."""


class LinkedKind(Kind[LinkedSpec]):
    """Services of other groups."""

    name: ClassVar[str] = LinkedSpec.kind
    spec = LinkedSpec
    call_types: ClassVar[frozenset[CallType]] = frozenset({CallType.TENSORS})
    runs_user_code = False

    def __init__(self, ask: AskGroup) -> None:
        self._ask = ask

    def list_versions(self, spec: LinkedSpec) -> Listing:
        """Return the only version, which stands for all."""
        return Listing({ONLY_VERSION: spec.base_path})

    def fingerprint(self, spec: LinkedSpec, directory: Path) -> str:
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
    return await plane.infer(request, CLUSTER_INTERFACE, _render)


def _render(response: InferResponse) -> tuple[bytes, int]:
    written = encode_response(response)
    data = written.joined() if isinstance(written, PiecedMessage) else bytes(written)
    return data, len(data)


async def describe_linked(plane: DataPlane, name: str) -> list[Any]:
    """Return the metadata of a service as plain data; raises ServerError as the data plane."""
    with await plane.registry.lease(name) as lease:
        if CallType.TENSORS not in lease.call_types:
            raise NotSupported(
                f"{unsupported_call_message(lease, 'calls from other groups')}, or place its callers in its group"
            )
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
