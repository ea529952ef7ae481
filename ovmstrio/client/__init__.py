"""Typed clients of the protocols, for the command line.

``open_client`` gives one of two classes with the same methods, so that a command works over either protocol.
"""

from ovmstrio.client.api import Client, Health, ModelInfo, ModelState, SequenceState, TensorInfo
from ovmstrio.client.connect import open_client
from ovmstrio.client.tls import ClientTls
from ovmstrio.protocol.status_errors import Unreachable

__all__ = [
    "Client",
    "ClientTls",
    "Health",
    "ModelInfo",
    "ModelState",
    "SequenceState",
    "TensorInfo",
    "Unreachable",
    "open_client",
]
