"""gRPC services of users: their ``.proto``, compiled and imported, and the handlers behind them."""

from ovmstrio.runtimes.handlers.grpc.project import (
    PASSING,
    CallEndedError,
    GrpcProject,
    WrongReplyError,
    open_grpc_project,
)
from ovmstrio.runtimes.handlers.grpc.services import Rpc, UserProto, UserService, open_proto

__all__ = [
    "PASSING",
    "CallEndedError",
    "GrpcProject",
    "Rpc",
    "UserProto",
    "UserService",
    "WrongReplyError",
    "open_grpc_project",
    "open_proto",
]
