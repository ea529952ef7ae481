"""gRPC over HTTP/2 on trio, without any knowledge of inference.

::

    bytes -> core (frames, headers, windows) -> events -> connection (reader, writer) -> call -> handler
    handler -> call (messages, status) -> core -> bytes -> connection's writer

``core`` is synchronous and free of I/O. ``connection`` gives it a stream and tasks, ``server`` listeners and an end.
"""

from ovmstrio.wire.grpc.limits import TransportLimits
from ovmstrio.wire.grpc.replies import ErrorMapper
from ovmstrio.wire.grpc.server import GrpclibService, GrpcServer, TrioService
from ovmstrio.wire.grpc.stream import Call, Metadata, current_call

__all__ = [
    "Call",
    "ErrorMapper",
    "GrpcServer",
    "GrpclibService",
    "Metadata",
    "TransportLimits",
    "TrioService",
    "current_call",
]
