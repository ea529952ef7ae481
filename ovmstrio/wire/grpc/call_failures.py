"""What a caller is told when a handler fails."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

__all__ = ["ErrorMapper", "FailureTranslator", "single_error"]

log = structlog.get_logger(__name__)

ErrorMapper = Callable[[Exception], GRPCError | None]


def single_error(error: Exception) -> Exception:
    """Unwrap groups that hold one error only, as nurseries make them."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class FailureTranslator:
    """Turns what a handler raised into a gRPC error.

    Args:
        map_error: the application's translation of its own errors; ``None`` from it means that it knows nothing
            about the error.
    """

    __slots__ = ("_map_error",)

    def __init__(self, map_error: ErrorMapper | None = None) -> None:
        self._map_error = map_error

    def translate(self, error: Exception, path: str) -> GRPCError:
        """Find the answer for any error of a handler; unforeseen ones are logged and become INTERNAL."""
        error = single_error(error)
        known = self._known(error)
        if known is not None:
            return known
        if isinstance(error, StreamTerminatedError):
            return GRPCError(Status.CANCELLED, str(error))
        log.error("rpc handler failed", path=path, error=repr(error), exc_info=error)
        return GRPCError(Status.INTERNAL, f"{path}: the server failed on this call ({type(error).__name__})")

    def undecodable(self, error: Exception, message_type: type) -> GRPCError:
        """Find the answer for bytes that the codec could not read."""
        known = self._known(error)
        if known is not None:
            return known
        return GRPCError(
            Status.INVALID_ARGUMENT, f"request is not a valid {message_type.__name__}: {type(error).__name__}: {error}"
        )

    def no_reply(self, path: str) -> GRPCError:
        """Find the answer for a unary call whose handler returned without one."""
        log.error("rpc handler sent no reply", path=path)
        return GRPCError(Status.INTERNAL, f"{path}: the server sent no reply")

    def _known(self, error: Exception) -> GRPCError | None:
        if isinstance(error, GRPCError):
            return error
        return self._map_error(error) if self._map_error is not None else None
