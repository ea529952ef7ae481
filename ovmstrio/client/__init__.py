"""Typed, blocking clients of KServe v2.

``open_client`` returns a client for gRPC or REST; both have the same methods.
"""

from ovmstrio.client.api import (
    Client,
    Health,
    ModelInfo,
    ModelState,
    Parameter,
    Posted,
    SequenceState,
    ServerInfo,
    StreamOutput,
    StreamReply,
    StreamRequest,
    TensorInfo,
)
from ovmstrio.client.factory import open_client
from ovmstrio.client.tls import ClientTls
from ovmstrio.core.tensor import Array
from ovmstrio.encoding.status_errors import Unreachable

__all__ = [
    "Array",
    "Client",
    "ClientTls",
    "Health",
    "ModelInfo",
    "ModelState",
    "Parameter",
    "Posted",
    "SequenceState",
    "ServerInfo",
    "StreamOutput",
    "StreamReply",
    "StreamRequest",
    "TensorInfo",
    "Unreachable",
    "open_client",
]
