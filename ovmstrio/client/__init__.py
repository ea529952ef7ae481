"""Typed clients of KServe v2, which wait in the thread that calls them.

``open_client`` gives one of two classes with the same methods, so that a program works over either protocol.
"""

from ovmstrio.client.api import (
    Client,
    Health,
    ModelInfo,
    ModelState,
    Parameter,
    Posted,
    SequenceState,
    StreamOutput,
    StreamReply,
    StreamRequest,
    TensorInfo,
)
from ovmstrio.client.connect import ClientTls, open_client
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
    "StreamOutput",
    "StreamReply",
    "StreamRequest",
    "TensorInfo",
    "Unreachable",
    "open_client",
]
