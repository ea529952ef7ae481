"""Mapping of error classes to gRPC and HTTP statuses.

Where OVMS reports a client error as internal or unknown only because of a gap in its tables, this table reports a
client error. Most other statuses are those of OVMS; docs/compatibility.md lists the exceptions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.core import errors
from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import RESTORED_STEPS
from ovmstrio.transport.grpc.headers import ErrorWithTrailers, RetryableError

if TYPE_CHECKING:
    from collections.abc import Mapping


class StatusPair(NamedTuple):
    """gRPC and HTTP status of an error."""

    grpc: Status
    http: int


ERROR_STATUSES: Final[Mapping[type[errors.ServerError], StatusPair]] = {
    errors.ServerError: StatusPair(Status.INTERNAL, 500),
    errors.InvalidRequest: StatusPair(Status.INVALID_ARGUMENT, 400),
    errors.MalformedJson: StatusPair(Status.FAILED_PRECONDITION, 412),
    errors.InvalidField: StatusPair(Status.INVALID_ARGUMENT, 400),
    errors.ContextExceeded: StatusPair(Status.INVALID_ARGUMENT, 400),
    errors.MalformedPayload: StatusPair(Status.INVALID_ARGUMENT, 400),
    errors.MethodNotAllowed: StatusPair(Status.UNIMPLEMENTED, 406),
    errors.PayloadTooLarge: StatusPair(Status.RESOURCE_EXHAUSTED, 413),
    errors.RequestTooSlow: StatusPair(Status.DEADLINE_EXCEEDED, 408),
    errors.NotFound: StatusPair(Status.NOT_FOUND, 404),
    errors.ServiceMissing: StatusPair(Status.NOT_FOUND, 404),
    errors.VersionMissing: StatusPair(Status.NOT_FOUND, 404),
    errors.VersionRetired: StatusPair(Status.NOT_FOUND, 404),
    errors.SequenceMissing: StatusPair(Status.NOT_FOUND, 404),
    errors.AlreadyExists: StatusPair(Status.ALREADY_EXISTS, 409),
    errors.SequenceExists: StatusPair(Status.ALREADY_EXISTS, 409),
    errors.FailedPrecondition: StatusPair(Status.FAILED_PRECONDITION, 412),
    errors.SequenceEnding: StatusPair(Status.FAILED_PRECONDITION, 412),
    errors.SequenceRestored: StatusPair(Status.FAILED_PRECONDITION, 409),
    errors.NotReady: StatusPair(Status.UNAVAILABLE, 503),
    errors.WorkerRestarting: StatusPair(Status.UNAVAILABLE, 503),
    errors.VersionLoading: StatusPair(Status.UNAVAILABLE, 404),
    errors.ServiceLoading: StatusPair(Status.UNAVAILABLE, 503),
    errors.TooManySequences: StatusPair(Status.UNAVAILABLE, 503),
    errors.StorageFailure: StatusPair(Status.UNAVAILABLE, 503),
    errors.Overloaded: StatusPair(Status.RESOURCE_EXHAUSTED, 429),
    errors.QueueTimeExceeded: StatusPair(Status.RESOURCE_EXHAUSTED, 429),
    errors.TooManyRequests: StatusPair(Status.UNAVAILABLE, 503),
    errors.QueueTimeout: StatusPair(Status.UNAVAILABLE, 503),
    errors.CallerLimited: StatusPair(Status.RESOURCE_EXHAUSTED, 429),
    errors.Unauthenticated: StatusPair(Status.UNAUTHENTICATED, 401),
    errors.PermissionDenied: StatusPair(Status.PERMISSION_DENIED, 403),
    errors.MissingScope: StatusPair(Status.PERMISSION_DENIED, 403),
    errors.DeadlineExceeded: StatusPair(Status.DEADLINE_EXCEEDED, 504),
    errors.NotSupported: StatusPair(Status.UNIMPLEMENTED, 501),
    errors.ModelFailure: StatusPair(Status.INTERNAL, 500),
    errors.VersionsFailure: StatusPair(Status.INTERNAL, 500),
    errors.GraphFailure: StatusPair(Status.INVALID_ARGUMENT, 400),
    errors.UserCodeError: StatusPair(Status.INTERNAL, 500),
    errors.PipelineFailure: StatusPair(Status.UNKNOWN, 500),
    errors.CustomNodeFailure: StatusPair(Status.UNKNOWN, 500),
    errors.NothingToGather: StatusPair(Status.ABORTED, 204),
    errors.ConfigError: StatusPair(Status.INTERNAL, 500),
}


def error_status(error: errors.ServerError) -> StatusPair:
    """Return the statuses of an error: those of its class, else of the nearest base class."""
    for cls in type(error).__mro__:
        row = ERROR_STATUSES.get(cls)
        if row is not None:
            return row
    return ERROR_STATUSES[errors.ServerError]


def to_grpc_error(error: Exception) -> GRPCError | None:
    """Return the gRPC error of a server error; None for any other."""
    if isinstance(error, (errors.Overloaded, errors.WorkerRestarting)):
        return RetryableError(error_status(error).grpc, error.message, max(1.0, error.retry_after_seconds))
    if isinstance(error, ServerError):
        status = error_status(error).grpc
        if isinstance(error, errors.SequenceRestored):
            return ErrorWithTrailers(status, error.message, (RESTORED_STEPS, str(error.steps)))
        if challenge := www_authenticate_value(error):
            return ErrorWithTrailers(status, error.message, ("www-authenticate", challenge))
        return GRPCError(status, error.message)
    return None


def www_authenticate_value(error: ServerError) -> str:
    """Return the ``WWW-Authenticate`` value of an authentication failure (RFC 6750); empty for other errors."""
    if isinstance(error, errors.Unauthenticated):
        return 'Bearer realm="ovmstrio"' + (', error="invalid_token"' if error.is_wrong else "")
    if isinstance(error, errors.MissingScope):
        # A scope may contain the name that the caller requested, with any characters.
        scope = re.sub(r"[^!#-\[\]-~]", "?", error.scope)
        return f'Bearer realm="ovmstrio", error="insufficient_scope", scope="{scope}"'
    return ""
