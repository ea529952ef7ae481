"""Selection of a shard by sequence id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.grpc_paths import CALLS, INFER, MODEL_SPEC
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.models.sequences.requests import owner_index, read_control
from ovmstrio.protocols.kserve.grpc_messages import decode_request
from ovmstrio.protocols.kserve.rest_requests import read_infer_request

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.request import InferRequest

_NO_ID: Final = "missing sequence_id: the model is sharded by sequence id, so clients must choose ids"
_UNSUPPORTED_API: Final = "sequences of sharded models require KServe's ModelInfer or /v2/models/NAME/infer"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_HEAD_LENGTH: Final = "inference-header-content-length"


def shard_of(request: InferRequest, group: str, shards: int) -> str:
    """Return the shard of a sequence request; raises InvalidRequest if the request has no sequence id."""
    if shards == 1:
        return group
    control, _ = read_control(request)
    if not control.id:
        raise InvalidRequest(_NO_ID)
    return shard_names(group, shards)[owner_index(control.id, shards)]


def grpc_shard(path: str, data: bytes, group: str, shards: int) -> str:
    """Return the shard of a gRPC call; the first one for calls without sequence.

    Raises:
        InvalidRequest: malformed sequence request, or without sequence id.
        NotSupported: possibly a sequence request of another API.
    """
    if shards > 1 and path == INFER:
        return shard_of(decode_request(data), group, shards)
    if shards > 1 and CALLS[path] == MODEL_SPEC and path.endswith("/Predict"):
        raise NotSupported(_UNSUPPORTED_API)
    return shard_names(group, shards)[0]


def http_shard(request: HttpRequest, group: str, shards: int) -> str:
    """Return the shard of an HTTP request; the first one for requests without sequence.

    Raises:
        InvalidRequest: malformed sequence request, or without sequence id.
        NotSupported: possibly a sequence request of another API, or a request for the sequences of all shards.
    """
    if shards == 1:
        return group
    path = request.target.partition("?")[0].rstrip("/")
    if path.endswith("/infer") and request.method == "POST":
        return shard_of(read_infer_request("", "", request.body, request.header(_HEAD_LENGTH)), group, shards)
    if request.method not in _SAFE_METHODS or path.endswith("/sequences"):
        raise NotSupported(_UNSUPPORTED_API)
    return shard_names(group, shards)[0]
