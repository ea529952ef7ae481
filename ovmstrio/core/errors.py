"""Errors of the server, by cause.

::

    ServerError
    ├── InvalidRequest (ValueError)            the request can never succeed
    │   ├── MalformedJson                      the body is not JSON
    │   ├── InvalidField                       a request field is invalid (field path and error code)
    │   │   └── ContextExceeded                prompt and completion exceed the context length
    │   ├── MalformedPayload                   a handler body does not match its content type
    │   ├── MethodNotAllowed                   the path exists, the HTTP method does not
    │   ├── PayloadTooLarge                    a message exceeds the configured limit
    │   └── RequestTooSlow                     the request was not received in time
    ├── NotFound (LookupError)                 unknown name or version
    │   ├── ServiceMissing                     unknown name
    │   ├── VersionMissing                     unknown version
    │   ├── VersionRetired                     the version was served and has been unloaded
    │   └── SequenceMissing                    unknown or ending sequence id
    ├── AlreadyExists                          the object to create exists
    │   └── SequenceExists                     the sequence id is in use
    ├── FailedPrecondition                     valid request, wrong state of the servable
    │   ├── SequenceEnding                     the last request of the sequence is still running
    │   └── SequenceRestored                   the last steps of the sequence may be lost after a crash
    ├── NotReady                               the server or servable cannot answer now
    │   ├── VersionLoading                     the version is loading or failed to load
    │   │   └── ServiceLoading                 the same for a service with a single version
    │   ├── StorageFailure                     model storage or local disk failed
    │   └── TooManySequences                   sequence limit reached
    ├── Overloaded                             a queue or pool is full
    │   ├── QueueTimeExceeded                  the call cannot start or end in time
    │   ├── TooManyRequests                    concurrency limit of a handler reached
    │   └── CallerLimited                      quota of the caller exceeded
    ├── Unauthenticated                        missing or wrong credentials
    ├── PermissionDenied (PermissionError)     not allowed for this caller or address
    │   └── MissingScope                       the caller lacks a scope
    ├── DeadlineExceeded (TimeoutError)        the caller's deadline passed
    ├── NotSupported (NotImplementedError)     the servable has no such operation
    ├── ModelFailure (RuntimeError)            the model or runtime failed on a valid request
    │   └── VersionsFailure                    a rescanned version failed to load
    ├── GraphFailure (RuntimeError)            a graph node failed
    ├── UserCodeError (RuntimeError)           a handler raised
    ├── PipelineFailure (RuntimeError)         a pipeline node's output does not fit the next step
    │   └── CustomNodeFailure                  a custom node failed or returned invalid outputs
    ├── NothingToGather                        a demultiplexer got an empty tensor
    └── ConfigError (ValueError)               invalid configuration

The classes know no transport. ``ovmstrio.transport.statuses`` maps each class to a gRPC and an HTTP status.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from ovmstrio.util.truncation import MOST_CHARACTERS, cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType
    from typing import Self


class ServerError(Exception):
    """Root of all errors that are reported to clients.

    ``message`` is fit for clients.  ``node`` names the node of the service that raised the error, or is empty.
    ``user_type`` is the type of the user's exception that the error reports, or empty.
    """

    node: str = ""
    user_type: str = ""

    def __init__(self, message: str) -> None:
        # User text within the message was truncated earlier; the limit leaves room for the server's words around it.
        message = cut(message, 2 * MOST_CHARACTERS)
        super().__init__(message)
        self.message = message


def error_type(error: BaseException) -> str:
    """Return the qualified name of an error's type; of an error that reports a user's exception, the type of that."""
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return getattr(error, "user_type", "") or name


class InvalidRequest(ServerError, ValueError):
    """The request can never succeed."""

    def with_message(self, message: str) -> InvalidRequest:
        """Return the same error with another message."""
        return InvalidRequest(message)


class MalformedJson(InvalidRequest):
    """The body is not JSON; OVMS answers with status 412."""


class InvalidField(InvalidRequest):
    """A request field is invalid.

    Attributes:
        plain: the message without the received value.
        field: path of the field, such as ``messages[2].content``; empty for the request itself.
        code: machine-readable error code, or empty.
    """

    def __init__(self, message: str, *, field: str = "", code: str = "", got: str = "") -> None:
        super().__init__(f"{message}; got {got}" if got else message)
        self.plain = message
        self.field = field
        self.code = code

    def with_message(self, message: str) -> InvalidField:
        """Return the error of the same field with another message."""
        made = type(self)(message, field=self.field, code=self.code)
        made.plain = self.plain
        return made


class ContextExceeded(InvalidField):
    """Prompt and completion together exceed the context length."""

    def __init__(self, message: str, *, field: str = "", code: str = "context_length_exceeded", got: str = "") -> None:
        super().__init__(message, field=field, code=code, got=got)


class MalformedPayload(InvalidRequest):
    """The body of a handler request does not match its content type; ``is_json`` if that is JSON."""

    def __init__(self, message: str, *, is_json: bool = False) -> None:
        super().__init__(message)
        self.is_json = is_json


class MethodNotAllowed(InvalidRequest):
    """The path exists, the HTTP method does not."""


class PayloadTooLarge(InvalidRequest):
    """A message is larger than ``max_message_size``."""

    @classmethod
    def of_outputs(cls, size: int, limit: float) -> Self:
        """Return the error for outputs of ``size`` bytes, raised before any output is copied."""
        return cls(f"the outputs have {size} bytes, the limit is {limit:.0f} (--max-message-size)")


class RequestTooSlow(InvalidRequest):
    """The request was not received in time."""


class NotFound(ServerError, LookupError):
    """Nothing is served under that name or version."""


class ServiceMissing(NotFound):
    """No service has that name."""


class VersionMissing(NotFound):
    """The service has no such version.

    ``tried`` is the default version if it failed to load, ``reason`` the reason.
    """

    def __init__(self, message: str, *, tried: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.tried = tried
        self.why = reason


class VersionRetired(NotFound):
    """The version was served and has been unloaded; ``kind`` is the kind of the service."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class SequenceMissing(NotFound):
    """No live sequence has that id: never started, ended, timed out or ending."""


class AlreadyExists(ServerError):
    """The object to create exists."""


class SequenceExists(AlreadyExists):
    """The sequence id is in use."""


class FailedPrecondition(ServerError):
    """The request is valid, but the servable is in the wrong state."""


class SequenceEnding(FailedPrecondition):
    """The last request of the sequence with that id is still running."""


class SequenceRestored(FailedPrecondition):
    """The sequence was restored after a crash with its first ``steps`` steps; the client must send later ones again."""

    def __init__(self, message: str, *, steps: int) -> None:
        super().__init__(message)
        self.steps = steps

    @classmethod
    def of(cls, identity: int | str, steps: int) -> SequenceRestored:
        """Return the error of a sequence; clients and remote models recognize its message."""
        text = f"sequence {identity} was restored with {steps} steps, later steps may be lost: continue with step"
        return cls(f"{text} {steps + 1}, or start the sequence again", steps=steps)


class NotReady(ServerError):
    """The server or servable cannot answer now; the same request may succeed later."""


class WorkerRestarting(NotReady):
    """The worker that owns a sequence or a text engine is restarting; ``retry_after_seconds`` as for ``Overloaded``."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class VersionLoading(NotReady):
    """The version is loading or ``has_failed`` to load; ``reason`` is the reason, set for some kinds."""

    def __init__(self, message: str, *, kind: str = "", has_failed: bool = False, reason: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.has_failed = has_failed
        self.why = reason


class ServiceLoading(VersionLoading):
    """The single version of the service is loading or failed to load."""


class StorageFailure(NotReady):
    """Model storage could not be read or the local disk could not be written.

    ``retry_after_seconds`` is the pause that the storage asks for; ``is_permanent`` that a retry cannot succeed.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.is_permanent = is_permanent


class TooManySequences(NotReady):
    """The model has reached its limit of live sequences."""


class Overloaded(ServerError):
    """A bounded queue or pool is full; ``retry_after_seconds`` estimates when a retry may succeed."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueTimeExceeded(Overloaded):
    """A call waited in a queue for ``max_queue_time``, or would have to, or would end after its client has given up."""

    @classmethod
    def after(cls, seconds: float) -> QueueTimeExceeded:
        """Return the error of a call that has waited for ``seconds``."""
        text = f"the call could not start within {seconds:g} s (max_queue_time); try again later"
        return cls(text, retry_after_seconds=max(1.0, seconds))


class TooManyRequests(Overloaded):
    """A handler project has reached its ``max_concurrency``."""


class QueueTimeout(Overloaded):
    """A call waited for a thread or process until the queue timeout."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"no thread or process was free within {seconds:g} s (--queue-timeout); try again later",
            retry_after_seconds=seconds,
        )


class CallerLimited(Overloaded):
    """The caller has exceeded a quota."""


class Unauthenticated(ServerError):
    """The request has no valid credentials; ``is_wrong`` if it had credentials at all."""

    def __init__(self, message: str, *, is_wrong: bool = False) -> None:
        super().__init__(message)
        self.is_wrong = is_wrong


class PermissionDenied(ServerError, PermissionError):
    """The caller, or its address, is not allowed to do this."""


class MissingScope(PermissionDenied):
    """The authenticated ``caller`` lacks ``scope``."""

    def __init__(self, caller: str, scope: str) -> None:
        super().__init__(f"{caller!r} lacks the scope {scope}")
        self.caller = caller
        self.scope = scope


class DeadlineExceeded(ServerError, TimeoutError):
    """The caller's deadline passed before the response was ready."""


class NotSupported(ServerError, NotImplementedError):
    """The servable has no such operation."""


class ModelFailure(ServerError, RuntimeError):
    """The model or its runtime failed on a valid request."""


class VersionsFailure(ModelFailure):
    """Versions found by a rescan of the repository could not be loaded."""


class GraphFailure(ServerError, RuntimeError):
    """A graph node failed.

    OVMS reports this as a client error whatever the cause, and clients expect that status.
    """


class UserCodeError(ServerError, RuntimeError):
    """A handler raised; ``detail`` is logged and not sent to the client."""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = cut(detail, 2 * MOST_CHARACTERS)


class PipelineFailure(ServerError, RuntimeError):
    """A pipeline node returned outputs that do not fit the next step."""


class CustomNodeFailure(PipelineFailure):
    """A custom node returned an error or invalid outputs."""


class NothingToGather(ServerError):
    """A demultiplexer got an empty tensor, so the following nodes have no input."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration.

    ``path`` is the place inside the document (``model_config_list[0].config.nireq``); ``line`` counts from 1;
    ``suggestion`` is a hint; ``severity`` is ``"error"`` or ``"warning"``.
    """

    message: str
    file: str = ""
    line: int | None = None
    path: str = ""
    expected: str = ""
    found: str = ""
    suggestion: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        where = ":".join(part for part in (self.file, "" if self.line is None else str(self.line)) if part)
        parts = [part for part in (where, self.path, self.message) if part]
        text = ": ".join(parts)
        facts = [f"expected {self.expected}"] if self.expected else []
        facts += [f"found {self.found}"] if self.found else []
        if facts:
            text += f" ({', '.join(facts)})"
        if self.suggestion:
            text += f"; {self.suggestion}"
        return text


class ConfigError(ServerError, ValueError):
    """Invalid configuration, with all problems found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("")
        # Set after construction, as the list of problems must not be truncated.
        self.message = "\n".join(str(problem) for problem in problems)
        self.args = (self.message,)


# Error lists

_MOST: Final = 8
"""Number of errors that are listed; further errors are only counted."""
_MOST_CHARACTERS: Final = 500
"""Length limit of each message after the first one."""
MAX_ERRORS: Final = 32
"""Number of errors after which parsing of a request stops: a list of 16,000 invalid items makes no 16,000 errors."""


class ErrorList:
    """Collector of the errors of one request.

    Each part is parsed in its own ``with`` block, which ends where the part is invalid.  The error that reaches
    :data:`MAX_ERRORS` is raised at once, so that parsing stops::

        wrong = ErrorList()
        for part in parts:
            with wrong:
                made.append(read(part))
        wrong.raise_if_any()
    """

    __slots__ = ("_count", "_kept")

    def __init__(self, errors: Iterable[InvalidRequest] = ()) -> None:
        self._kept: list[InvalidRequest] = []
        self._count = 0
        for error in islice(errors, MAX_ERRORS):
            self._take(error)

    def __bool__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        # At the limit the error is the one that :meth:`add` raised in an inner block.
        if not isinstance(error, InvalidRequest) or self._count >= MAX_ERRORS:
            return False
        self.add(error)
        return True

    def add(self, error: InvalidRequest) -> None:
        """Add one error.

        Raises:
            InvalidRequest: the limit is reached; it contains all errors so far.
        """
        self._take(error)
        if self._count >= MAX_ERRORS:
            raise self.error() from None

    def _take(self, error: InvalidRequest) -> None:
        self._count += 1
        if len(self._kept) < _MOST:
            # The traceback would keep the request data alive.
            self._kept.append(error.with_traceback(None))

    def error(self) -> InvalidRequest:
        """Return all errors as one: a single error as it is, else the first error with the messages joined."""
        if self._count == 1:
            return self._kept[0]
        texts = [self._kept[0].message, *(cut(error.message, _MOST_CHARACTERS) for error in self._kept[1:])]
        if self._count > _MOST:
            rest = ", and the rest of the request was not checked" if self._count >= MAX_ERRORS else ""
            texts.append(f"{self._count - _MOST} more{rest}")
        return self._kept[0].with_message(". Also: ".join(texts))

    def raise_if_any(self) -> None:
        """Raise the joined InvalidRequest if errors were added."""
        if self._count:
            raise self.error()


def add_error(wrong: ErrorList | None, error: InvalidRequest) -> ErrorList:
    """Add an error to a collector that is created on the first error only."""
    wrong = wrong or ErrorList()
    wrong.add(error)
    return wrong


# gRPC statuses

_HTTP_STATUSES: Final = {
    "OK": 200,
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
    "UNAUTHENTICATED": 401,
}
"""HTTP status by gRPC status name, in the order of the gRPC numbers."""

GRPC_STATUSES: Final = tuple(_HTTP_STATUSES)
"""gRPC status names by number."""


def http_status_of(status: int) -> int:
    """Return the HTTP status for a gRPC status number."""
    return _HTTP_STATUSES[GRPC_STATUSES[status]]
