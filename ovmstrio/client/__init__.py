"""Typed clients of KServe v2, which wait in the thread that calls them.

``open_client`` gives one of two classes with the same methods, so that a program works over either protocol.
"""

from ovmstrio.client.api import Client, Health, ModelInfo, ModelState, Parameter, Posted, SequenceState, TensorInfo
from ovmstrio.client.connect import open_client
from ovmstrio.client.streaming import StreamOutput, StreamReply, StreamRequest
from ovmstrio.client.tls import ClientTls
from ovmstrio.core.tensor import Array
from ovmstrio.protocol.status_errors import Unreachable

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
