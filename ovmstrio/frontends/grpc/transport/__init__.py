"""gRPC over HTTP/2 on trio, without any knowledge of inference.

::

    bytes -> core (frames, headers, windows) -> events -> connection (reader, writer) -> call -> handler
    handler -> call (messages, status) -> core -> bytes -> connection's writer

``core`` is synchronous and free of I/O. ``connection`` gives it a stream and tasks, ``server`` listeners and an end.
"""

from ovmstrio.frontends.grpc.transport.failures import ErrorMapper
from ovmstrio.frontends.grpc.transport.limits import TransportLimits
from ovmstrio.frontends.grpc.transport.listeners import open_listeners, tls_context
from ovmstrio.frontends.grpc.transport.server import GrpcServer, Service
from ovmstrio.frontends.grpc.transport.services import TrioService
from ovmstrio.frontends.grpc.transport.stream import Call, Metadata, Peer, current_call

__all__ = [
    "Call",
    "ErrorMapper",
    "GrpcServer",
    "Metadata",
    "Peer",
    "Service",
    "TransportLimits",
    "TrioService",
    "current_call",
    "open_listeners",
    "tls_context",
]
