"""What can go wrong, and whose fault it is.

::

    ServerError
    ├── InvalidRequest (ValueError)            the caller sent something that cannot be served
    │   ├── MalformedJson                      a body that is not JSON at all
    │   ├── InvalidField                       a field of a request, which programs are told
    │   │   └── ContextExceeded                prompt and answer are longer than a model takes
    │   ├── MalformedPayload                   a body that is not what its content type says, for a handler
    │   ├── MethodNotAllowed                   a known path, the wrong verb
    │   ├── PayloadTooLarge                    a message above the configured limit
    │   └── RequestTooSlow                     a request took longer to come than it may
    ├── NotFound (LookupError)                 nothing of that name or version is known
    │   ├── ServiceMissing                     nothing is called so
    │   ├── VersionMissing                     what is called so has no such version
    │   ├── VersionRetired                     the version was served once and is not any more
    │   └── SequenceMissing                    no sequence has that id, or it is about to end
    ├── AlreadyExists                          the caller creates what is there
    │   └── SequenceExists                     a sequence has that id
    ├── FailedPrecondition                     right request, wrong state of the servable
    │   └── SequenceEnding                     the id is free only when the last request of its sequence is done
    ├── NotReady                               the server or servable cannot answer yet, or not any more
    │   ├── VersionLoading                     the version is being loaded
    │   │   └── ServiceLoading                 the same of what has only one version
    │   ├── StorageFailure                     a storage of models cannot be read or written now
    │   └── TooManySequences                   no sequence can be started before another one ends
    ├── Overloaded                             a queue or pool is full; try again later
    │   ├── TooManyRequests                    as many requests as a handler may have are in flight
    │   └── CallerLimited                      the caller asks for more than it may
    ├── Unauthenticated                        who asks has not shown who it is
    ├── PermissionDenied (PermissionError)     who asks may not do that from where it is
    │   └── MissingScope                       the caller has no scope for it
    ├── DeadlineExceeded (TimeoutError)        the caller's deadline passed first
    ├── NotSupported (NotImplementedError)     the servable has no such operation
    ├── ModelFailure (RuntimeError)            the model or the runtime failed on a valid request
    │   └── VersionsFailure                    a version that was looked for again cannot be loaded
    ├── GraphFailure (RuntimeError)            a node of a graph failed on its input
    ├── UserCodeError (RuntimeError)           a handler raised something of its own
    ├── PipelineFailure (RuntimeError)         what flows between the nodes of a pipeline does not fit together
    │   └── CustomNodeFailure                  a custom node failed, or gave what cannot be used
    ├── NothingToGather                        a demultiplexer of a pipeline had nothing to split
    └── ConfigError (ValueError)               what the operator wrote cannot be used

No class knows a transport: ``ovmstrio.transport.statuses`` holds the one total table from class to gRPC and HTTP
status.
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

__all__ = [
    "GRPC_STATUSES",
    "MAX_ERRORS",
    "AlreadyExists",
    "CallerLimited",
    "ConfigError",
    "ContextExceeded",
    "CustomNodeFailure",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Gathered",
    "GraphFailure",
    "InvalidField",
    "InvalidRequest",
    "MalformedJson",
    "MalformedPayload",
    "MethodNotAllowed",
    "MissingScope",
    "ModelFailure",
    "NotFound",
    "NotReady",
    "NotSupported",
    "NothingToGather",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "PipelineFailure",
    "Problem",
    "RequestTooSlow",
    "SequenceEnding",
    "SequenceExists",
    "SequenceMissing",
    "ServerError",
    "ServiceLoading",
    "ServiceMissing",
    "StorageFailure",
    "TooManyRequests",
    "TooManySequences",
    "Unauthenticated",
    "UserCodeError",
    "VersionLoading",
    "VersionMissing",
    "VersionRetired",
    "VersionsFailure",
    "http_status_of",
    "noted",
]

# ----------------------------------------------------------------------
# What can go wrong, and whose fault it is
# ----------------------------------------------------------------------


class ServerError(Exception):
    """Root of every error that the server means to tell its caller.

    ``message`` is fit for the caller: it names what was expected, what came and the way out.  ``node`` is the node of a
    service in which it was raised, for those who look; empty where there is none.
    """

    node: str = ""

    def __init__(self, message: str) -> None:
        # A text of a user's in it has been cut before; the words around it are the server's.
        message = cut(message, 2 * MOST_CHARACTERS)
        super().__init__(message)
        self.message = message


class InvalidRequest(ServerError, ValueError):
    """The caller's fault: the request can never be served as it is."""

    def retold(self, message: str) -> InvalidRequest:
        """Make the refusal that says this and more."""
        return InvalidRequest(message)


class MalformedJson(InvalidRequest):
    """The body is not JSON; OVMS answers this with a status of its own (412)."""


class InvalidField(InvalidRequest):
    """A field of a request cannot be as it is.

    Attributes:
        plain: the message without what came.
        field: its path, such as ``messages[2].content``; empty where it is the whole request.
        code: a word for programs; empty if there is none.
    """

    def __init__(self, message: str, *, field: str = "", code: str = "", got: str = "") -> None:
        super().__init__(f"{message}; got {got}" if got else message)
        self.plain = message
        self.field = field
        self.code = code

    def retold(self, message: str) -> InvalidField:
        """Make the refusal of the same field that says this and more."""
        made = type(self)(message, field=self.field, code=self.code)
        made.plain = self.plain
        return made


class ContextExceeded(InvalidField):
    """The tokens of prompt and answer together are more than a model takes."""

    def __init__(self, message: str, *, field: str = "", code: str = "context_length_exceeded", got: str = "") -> None:
        super().__init__(message, field=field, code=code, got=got)


class MalformedPayload(InvalidRequest):
    """The body for a handler is not what its content type says; ``is_json`` if that is JSON."""

    def __init__(self, message: str, *, is_json: bool = False) -> None:
        super().__init__(message)
        self.is_json = is_json


class MethodNotAllowed(InvalidRequest):
    """The path exists, the HTTP verb does not."""


class PayloadTooLarge(InvalidRequest):
    """A message is larger than ``max_message_size``."""

    @classmethod
    def of_outputs(cls, size: int, most: float) -> Self:
        """Refuse an answer because of what its outputs come to, before any of them is copied."""
        return cls(f"the outputs have {size} bytes, the limit is {most:.0f} (--max_message_size)")


class RequestTooSlow(InvalidRequest):
    """The request took longer to come than it may."""


class NotFound(ServerError, LookupError):
    """Nothing is served under that name or version."""


class ServiceMissing(NotFound):
    """Nothing is called so."""


class VersionMissing(NotFound):
    """What is called so has no such version.

    ``why`` says of the version ``tried``, which would be the default one, why it could not be loaded.
    """

    def __init__(self, message: str, *, tried: int = 0, why: str = "") -> None:
        super().__init__(message)
        self.tried = tried
        self.why = why


class VersionRetired(NotFound):
    """The version was served and has been retired; ``kind`` is that of the service."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class SequenceMissing(NotFound):
    """No sequence of that id goes on: it was never started, has ended, was idle for too long, or is ending."""


class AlreadyExists(ServerError):
    """The caller asked to create something that exists."""


class SequenceExists(AlreadyExists):
    """The id that a sequence is to be started with is another one's."""


class FailedPrecondition(ServerError):
    """The request is valid, but not in the state that the servable is in."""


class SequenceEnding(FailedPrecondition):
    """The id that a sequence is to be started with is that of one whose last request is not done yet."""


class NotReady(ServerError):
    """The server or servable cannot answer now; the same request may succeed later."""


class VersionLoading(NotReady):
    """The version exists and is still being loaded, or ``has_failed`` to load; ``why`` says so of some kinds."""

    def __init__(self, message: str, *, kind: str = "", has_failed: bool = False, why: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.has_failed = has_failed
        self.why = why


class ServiceLoading(VersionLoading):
    """The same of a service that has only one version."""


class StorageFailure(NotReady):
    """A storage of models could not be read, or the local disk not be written; it may be possible later."""


class TooManySequences(NotReady):
    """As many sequences as the model may have are alive."""


class Overloaded(ServerError):
    """A bounded queue or pool is full.

    ``retry_after_seconds`` is the server's guess of when it is worth trying again.
    """

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class TooManyRequests(Overloaded):
    """As many requests as the ``max_concurrency`` of a handler's project allows are in flight."""


class QueueTimeout(Overloaded):
    """A call waited for a thread or a process for as long as it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"nothing was free to run the call within {seconds:g} s (--queue_timeout); try again later",
            retry_after_seconds=seconds,
        )


class CallerLimited(Overloaded):
    """The caller has as many requests under way, or made as many lately, as it may."""


class Unauthenticated(ServerError):
    """Who asks has not shown who it is; ``is_wrong`` tells that it tried."""

    def __init__(self, message: str, *, is_wrong: bool = False) -> None:
        super().__init__(message)
        self.is_wrong = is_wrong


class PermissionDenied(ServerError, PermissionError):
    """Who asks may not do that, or not from there."""


class MissingScope(PermissionDenied):
    """Who asks, the ``caller``, is known and has no ``scope`` for it."""

    def __init__(self, caller: str, scope: str) -> None:
        super().__init__(f"{caller!r} may not do that: it needs the scope {scope}")
        self.caller = caller
        self.scope = scope


class DeadlineExceeded(ServerError, TimeoutError):
    """The caller's own deadline passed before the answer was ready."""


class NotSupported(ServerError, NotImplementedError):
    """The servable has no such operation."""


class ModelFailure(ServerError, RuntimeError):
    """The model or its runtime failed on a request that was valid."""


class VersionsFailure(ModelFailure):
    """Versions that were found by looking for them again could not be loaded."""


class GraphFailure(ServerError, RuntimeError):
    """A node of a graph failed.

    OVMS blames the caller's input for it, whatever the cause, and clients have come to expect that status.
    """


class UserCodeError(ServerError, RuntimeError):
    """A handler raised; ``detail`` is what the server may log but the caller need not know."""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = cut(detail, 2 * MOST_CHARACTERS)


class PipelineFailure(ServerError, RuntimeError):
    """What one node of a pipeline gave does not fit what is to be done with it."""


class CustomNodeFailure(PipelineFailure):
    """A custom node returned an error, or outputs that cannot be used."""


class NothingToGather(ServerError):
    """A demultiplexer got an empty tensor, so the nodes behind it have nothing to work on; no fault of anybody."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with what the operator wrote, said so that it can be mended.

    ``path`` is the place inside the document (``model_config_list[0].config.nireq``); ``line`` counts from 1;
    ``suggestion`` is the way out, where one is known.  ``severity`` is ``"error"`` or ``"warning"``.
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
        if self.expected or self.found:
            text += f" (expected {self.expected or 'something else'}, found {self.found or 'nothing'})"
        if self.suggestion:
            text += f"; {self.suggestion}"
        return text


class ConfigError(ServerError, ValueError):
    """What the operator wrote cannot be used; every problem that was found is listed at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("")
        # However many problems there are, each is told.
        self.message = "\n".join(str(problem) for problem in problems)
        self.args = (self.message,)


# ----------------------------------------------------------------------
# What is wrong with a request, gathered, so that one answer tells all of it
# ----------------------------------------------------------------------

_MOST: Final = 8
"""Refusals that are told one by one."""
_MOST_CHARACTERS: Final = 500
"""Of each that is told behind the first one."""
MAX_ERRORS: Final = 32
"""Refusals after which the rest of a request is not read: a list of 16,000 wrong members makes no 16,000 errors."""


class Gathered:
    """Refusals of the parts of one request.

    Each part is read in a block of its own, which ends where the part is refused; :meth:`tell` raises if any was.
    The refusal that reaches the limit is raised at once, so that the caller stops reading::

        wrong = Gathered()
        for part in parts:
            with wrong:
                made.append(read(part))
        wrong.tell()
    """

    __slots__ = ("_count", "_kept")

    def __init__(self, errors: Iterable[InvalidRequest] = ()) -> None:
        self._kept: list[InvalidRequest] = []
        self._count = 0
        for error in islice(errors, MAX_ERRORS):
            self._take(error)

    def __bool__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> None:
        """Begin to read a part."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        # At the limit the error is the one that :meth:`add` has raised within an inner block.
        if not isinstance(error, InvalidRequest) or self._count >= MAX_ERRORS:
            return False
        self.add(error)
        return True

    def add(self, error: InvalidRequest) -> None:
        """Add one refusal.

        Raises:
            InvalidRequest: the limit is reached; all refusals so far as one error, and nothing else is read.
        """
        self._take(error)
        if self._count >= MAX_ERRORS:
            raise self.error() from None

    def _take(self, error: InvalidRequest) -> None:
        self._count += 1
        if len(self._kept) < _MOST:
            # Its traceback would keep what the request was read from.
            self._kept.append(error.with_traceback(None))

    def error(self) -> InvalidRequest:
        """Make one error of all, of which there are some: a single one as it is, else its text before others'."""
        if self._count == 1:
            return self._kept[0]
        texts = [self._kept[0].message, *(cut(error.message, _MOST_CHARACTERS) for error in self._kept[1:])]
        if self._count > _MOST:
            rest = ", and the rest of the request was not checked" if self._count >= MAX_ERRORS else ""
            texts.append(f"{self._count - _MOST} more{rest}")
        return self._kept[0].retold(". Also: ".join(texts))

    def tell(self) -> None:
        """Do nothing if there are none.

        Raises:
            InvalidRequest: there are.
        """
        if self._count:
            raise self.error()


def noted(wrong: Gathered | None, error: InvalidRequest) -> Gathered:
    """Take one more where there may be none yet: for what every request is read with, which mostly is right."""
    wrong = wrong or Gathered()
    wrong.add(error)
    return wrong


# ----------------------------------------------------------------------
# The statuses of gRPC by their numbers: their names, and those of HTTP that say the same
# ----------------------------------------------------------------------

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
"""In the order of their numbers."""

GRPC_STATUSES: Final = tuple(_HTTP_STATUSES)
"""Their names."""


def http_status_of(status: int) -> int:
    """Give the status of HTTP that says the same."""
    return _HTTP_STATUSES[GRPC_STATUSES[status]]
