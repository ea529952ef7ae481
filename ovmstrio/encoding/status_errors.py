"""From the statuses of either wire back to the error that the server raised."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ovmstrio.core import errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Unreachable(errors.ServerError):
    """Nobody answers at the address, or the connection broke before an answer came."""


_GRPC: Final[Mapping[str, type[errors.ServerError]]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "UNAVAILABLE": errors.NotReady,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "UNIMPLEMENTED": errors.NotSupported,
    "INTERNAL": errors.ModelFailure,
    "ABORTED": errors.NothingToGather,
    "UNKNOWN": errors.PipelineFailure,
}
_HTTP: Final[Mapping[int, type[errors.ServerError]]] = {
    204: errors.NothingToGather,
    400: errors.InvalidRequest,
    401: errors.Unauthenticated,
    403: errors.PermissionDenied,
    404: errors.NotFound,
    406: errors.MethodNotAllowed,
    408: errors.RequestTooSlow,
    409: errors.AlreadyExists,
    412: errors.FailedPrecondition,
    413: errors.PayloadTooLarge,
    429: errors.Overloaded,
    500: errors.ModelFailure,
    501: errors.NotSupported,
    503: errors.NotReady,
    504: errors.DeadlineExceeded,
}

_TEXTS: Final[Mapping[str, type[errors.ServerError]]] = {
    "Model with requested version is not loaded yet": errors.VersionLoading,
    "Model with requested version is retired": errors.VersionRetired,
    "Mediapipe is not loaded yet": errors.ServiceLoading,
    "Mediapipe is retired": errors.VersionRetired,
    "Mediapipe execution failed": errors.GraphFailure,
}
"""Beginnings of messages whose class their status, which others share, does not tell."""


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Read an answer inside the block; one that is not KServe's raises ``ServerError``."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.ServerError(f"{address} does not answer as a KServe v2 server does: {error}") from None


def error_of_grpc(status: str, message: str) -> errors.ServerError:
    """Make the error of a gRPC status, named as in ``StatusCode``."""
    return _made(_GRPC.get(status), message, status, f"gRPC status {status}")


def error_of_http(status: int, message: str) -> errors.ServerError:
    """Make the error of an HTTP status."""
    return _made(_HTTP.get(status), message, f"HTTP {status}", f"HTTP status {status}")


def status_of(error: errors.ServerError) -> str:
    """Tell the status that an error came with, such as ``gRPC status NOT_FOUND``; empty if the server sent none."""
    return "".join(getattr(error, "__notes__", ()))


def _made(cls: type[errors.ServerError] | None, message: str, status: str, note: str) -> errors.ServerError:
    cls = next((each for text, each in _TEXTS.items() if message.startswith(text)), cls)
    error = errors.ServerError(f"{status}: {message}") if cls is None else cls(message)
    error.add_note(note)
    return error
