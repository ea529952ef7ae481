"""Groups whose sequences are shared out among several parts: which part a request is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.grpc_paths import CALLS, INFER, MODEL_SPEC
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.models.sequences.requests import owner_of, read_control
from ovmstrio.protocols.kserve.grpc_requests import decode_request
from ovmstrio.protocols.kserve.rest_requests import read_infer_request

if TYPE_CHECKING:
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.request import InferRequest

__all__ = ["grpc_shard", "http_shard", "shard_of"]

_NO_ID: Final = (
    "the request starts a sequence without saying which: its model is shared out among several replicas by the ids of "
    "sequences, so that clients choose them (sequence_id)"
)
_OTHER_WAY: Final = "steps of a sequence find its replica by KServe's ModelInfer and /v2/models/NAME/infer alone"
_ASKING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_HEAD_LENGTH: Final = "inference-header-content-length"


def shard_of(request: InferRequest, group: str, shards: int) -> str:
    """Name the part of a group that a request of a sequence is for.

    Raises:
        InvalidRequest: it does not say which sequence it is for.
    """
    if shards == 1:
        return group
    control, _ = read_control(request)
    if not control.id:
        raise InvalidRequest(_NO_ID)
    return shard_names(group, shards)[owner_of(control.id, shards)]


def grpc_shard(path: str, data: bytes, group: str, shards: int) -> str:
    """Name the part of a group that a call is for; any if it is no step.

    Raises:
        InvalidRequest: it is one, and cannot be read, or does not say of which sequence.
        NotSupported: it may be one, of another API.
    """
    if shards > 1 and path == INFER:
        return shard_of(decode_request(data), group, shards)
    if shards > 1 and CALLS[path] == MODEL_SPEC and path.endswith("/Predict"):
        raise NotSupported(_OTHER_WAY)
    return shard_names(group, shards)[0]


def http_shard(request: HttpRequest, group: str, shards: int) -> str:
    """Name the part of a group that a request is for; any if it is no step.

    Raises:
        InvalidRequest: it is one, and cannot be read, or does not say of which sequence.
        NotSupported: it may be one, of another API, or is about the sequences of all parts.
    """
    if shards == 1:
        return group
    path = request.target.partition("?")[0].rstrip("/")
    if path.endswith("/infer") and request.method == "POST":
        return shard_of(read_infer_request("", "", request.body, request.header(_HEAD_LENGTH)), group, shards)
    if request.method not in _ASKING or path.endswith("/sequences"):
        raise NotSupported(_OTHER_WAY)
    return shard_names(group, shards)[0]
