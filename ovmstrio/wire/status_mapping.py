"""From the domain's errors to gRPC's: what the transport asks when a handler or the codec fails."""

from __future__ import annotations

from grpclib.exceptions import GRPCError

from ovmstrio.core.errors import ServerError
from ovmstrio.wire.statuses import status_of

__all__ = ["map_error"]


def map_error(error: Exception) -> GRPCError | None:
    """Give the status and the text of an error that is meant for the caller, None for any other."""
    if isinstance(error, ServerError):
        return GRPCError(status_of(error).grpc, error.message)
    return None
