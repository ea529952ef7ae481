"""Server errors from the gRPC and HTTP statuses of responses."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ovmstrio.core import errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Unreachable(errors.ServerError):
    """Error of a server that cannot be reached, or whose connection closed before a response."""


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

_CLASS_BY_MESSAGE: Final[Mapping[str, type[errors.ServerError]]] = {
    "Model with requested version is not loaded yet": errors.VersionLoading,
    "Model with requested version is retired": errors.VersionRetired,
    "Mediapipe is not loaded yet": errors.ServiceLoading,
    "Mediapipe is retired": errors.VersionRetired,
    "Mediapipe execution failed": errors.GraphFailure,
}
"""Errors by the start of their message, for classes that share their status."""

_RESTORED: Final = re.compile(r"sequence .+ was restored with (\d+) steps, ")


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Raise ``ServerError`` for parse errors in the block, which parses a response."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.ServerError(f"{address} does not answer as a KServe v2 server does: {error}") from None


def error_of_grpc(status: str, message: str, headers: Mapping[str, str] | None = None) -> errors.ServerError:
    """Create the error of a gRPC status, named as in ``StatusCode``; ``headers`` may have a time to wait."""
    return _create_error(_GRPC.get(status), message, status, f"gRPC status {status}", headers)


def error_of_http(status: int, message: str, headers: Mapping[str, str] | None = None) -> errors.ServerError:
    """Create the error of an HTTP status; ``headers`` may have a time to wait."""
    return _create_error(_HTTP.get(status), message, f"HTTP {status}", f"HTTP status {status}", headers)


def retry_seconds(headers: Mapping[str, str]) -> float | None:
    """Return after how many seconds the server invites another try; None if it does not."""
    milliseconds = headers.get("grpc-retry-pushback-ms", "")
    if milliseconds.isdecimal():
        return int(milliseconds) / 1000
    seconds = headers.get("retry-after", "")
    return int(seconds) if seconds.isdecimal() else None


def status_of(error: errors.ServerError) -> str:
    """Return the status of an error, such as ``gRPC status NOT_FOUND``; empty if the server sent none."""
    return "".join(getattr(error, "__notes__", ()))


def _create_error(
    cls: type[errors.ServerError] | None, message: str, status: str, note: str, headers: Mapping[str, str] | None
) -> errors.ServerError:
    cls = next((found for text, found in _CLASS_BY_MESSAGE.items() if message.startswith(text)), cls)
    if restored := _RESTORED.match(message):
        error: errors.ServerError = errors.SequenceRestored(message, steps=int(restored[1]))
    else:
        error = errors.ServerError(f"{status}: {message}") if cls is None else cls(message)
    if isinstance(error, errors.Overloaded) and headers and (seconds := retry_seconds(headers)):
        error.retry_after_seconds = seconds
    error.add_note(note)
    return error
