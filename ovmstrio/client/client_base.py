"""Base of ``Client`` and ``AsyncClient``: settings, error mapping, retries within a deadline, and sequence state."""

from __future__ import annotations

import math
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.client.addresses import parse_address, read_headers
from ovmstrio.client.calls import ClientCall, GrpcCalls, RestCalls, T
from ovmstrio.client.links import LinkError, NotProcessed
from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, NotFound, NotReady, Overloaded, ServerError
from ovmstrio.encoding.status_errors import Unreachable, retry_seconds
from ovmstrio.util.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ovmstrio.client.addresses import ServerAddress
    from ovmstrio.client.api import InferResult, Parameter, Value
    from ovmstrio.client.links import Answer, Link
    from ovmstrio.client.tls import ClientTls

DEFAULT_TIMEOUT_SECONDS: Final = 60.0
DEFAULT_RETRIES: Final = 2
READ_BYTES: Final = 256 * 1024
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0


class NotSent(Unreachable):
    """The server did not process the request, so a retry is safe."""


class Refused(Exception):
    """The server rejected the call before it started, with a retry delay (``Retry-After`` or gRPC pushback)."""

    def __init__(self, error: ServerError, seconds: float) -> None:
        super().__init__(error)
        self.error = error
        self.seconds = seconds


class Attempts:
    """Deadline and retries of one call."""

    def __init__(self, retries: int, timeout: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._retries_left = retries
        self._backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._deadline = math.inf if timeout is None else clock() + timeout

    def left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return self._deadline if self._deadline == math.inf else max(0.0, self._deadline - self._clock())

    def pause_after(self, failure: NotSent | Refused) -> float:
        """Return the delay before the next attempt; raise the error if no attempt is left before the deadline."""
        seconds = failure.seconds if isinstance(failure, Refused) else self._backoff.seconds_after()
        if not self._retries_left or seconds >= self.left():
            raise (failure.error if isinstance(failure, Refused) else failure) from None
        self._retries_left -= 1
        return seconds


class ClientBase:
    """Settings of a client, and its errors."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float | None,
        retries: int,
        tls: ClientTls | bool | None,
        api_key: str,
        headers: Mapping[str, str] | None,
        address: ServerAddress | None = None,
    ) -> None:
        self._address = address or parse_address(url, tls)
        self._timeout = timeout
        self._retries = retries
        self._invalid_response = "does not answer as a KServe v2 server does"
        fields = read_headers(api_key, headers)
        self._calls: GrpcCalls | RestCalls = (GrpcCalls if self._address.is_grpc else RestCalls)(self._address, fields)
        self._endpoint = f"{self._calls.name} at {self._address.text}"

    def _finish(self, call: ClientCall[T], answer: Answer, link: Link) -> T:
        """Return the value of a response; raise its error, or ``RetryAfter`` if the server sent a delay."""
        received = link.received
        answer.body = received.popleft() if len(received) == 1 else b"".join(received)
        received.clear()
        if not call.reads_failures and (error := self._calls.error(answer)) is not None:
            raise self._retry_after(error, answer) or error
        try:
            return call.read(answer)
        except ServerError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._malformed(error) from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise ``ServerError`` for parse errors in the block."""
        try:
            yield
        except ServerError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._malformed(error) from None

    def _malformed(self, error: Exception) -> ServerError:
        return ServerError(f"{self._address.text} {self._invalid_response}: {error}")

    def _retry_after(self, error: ServerError, answer: Answer) -> Refused | None:
        if isinstance(error, Overloaded | NotReady) and (seconds := retry_seconds(answer.headers)) is not None:
            return Refused(error, seconds)
        return None

    def _unreachable(self, reason: object) -> NotSent:
        return NotSent(f"no server answers {self._endpoint}: {reason}")

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._address.text} did not answer in time")

    def _failure(self, error: BaseException, *, is_stream: bool = False) -> NotSent:
        """Return the error of a connection that failed during a call; raises it if the call must not be repeated."""
        if isinstance(error, NotProcessed):
            return self._unreachable(error)
        if isinstance(error, TimeoutError):
            raise self._late() from None
        if isinstance(error, OSError | LinkError):
            text = str(error) if isinstance(error, LinkError) else f"the connection broke: {error}"
            if is_stream:
                raise Unreachable(f"the stream from {self._address.text} broke: {text}") from None
            raise Unreachable(f"no server answers {self._endpoint}: {text}") from None
        raise error


# -- Sequences ---------------------------------------------------------------------------------------------------------

SEQUENCE_ID: Final = "sequence_id"
_LARGEST_INTEGER: Final = 2**63 - 1
_MAX_SEQUENCE_ID: Final = 2**48
"""Number of possible ids: small enough for JSON readers that parse numbers as doubles."""
END_SECONDS: Final = 5.0
"""Longest time to end a sequence after an error."""


class SequenceControls:
    """State of one sequence: its id and the control parameters of the next request.

    Attributes:
        id: id of the sequence.
        is_started: a request was answered; after a lost answer the server may have the sequence without that.
        last: last accepted inputs, to be sent again with the end control; None if no end is needed.
    """

    def __init__(self, model: str, sequence_id: int | str | None) -> None:
        # If the server chose the id, a client that is interrupted in its first call could not end the sequence.
        self.id = secrets.randbelow(_MAX_SEQUENCE_ID) + 1 if sequence_id is None else sequence_id
        self._model = model
        self.is_started = self._is_ended = False
        self._sent: Mapping[str, Value] = {}
        self.last: Mapping[str, Value] | None = None

    def parameters(self, inputs: Mapping[str, Value], *, end: bool, may_start: bool = True) -> dict[str, Parameter]:
        """Return the parameters of the next request; raises ``InvalidRequest`` after the end."""
        if self._is_ended:
            raise InvalidRequest(f"sequence {self.id} has ended")
        self._sent = inputs
        is_large = isinstance(self.id, int) and self.id > _LARGEST_INTEGER
        number: Parameter = str(self.id) if is_large else self.id
        return {SEQUENCE_ID: number, "sequence_start": may_start and not self.is_started, "sequence_end": end}

    def answered(self, result: InferResult, *, end: bool) -> InferResult:
        """Record an answer; raises ``InvalidRequest`` if the model is not stateful."""
        self.is_started, self._is_ended = True, end
        is_stateful = result.pop(SEQUENCE_ID, None) is not None
        self.last = self._sent if is_stateful and not end else None
        if not is_stateful:
            raise InvalidRequest(f'"{self._model}" is not stateful: its answer has no sequence_id')
        return result

    def failed(self, error: BaseException) -> None:
        """Record a failed request; unless the server rejected the request, the sequence may have started."""
        if isinstance(error, NotFound):
            self.last = None
        elif not isinstance(error, ServerError) or isinstance(error, Unreachable | DeadlineExceeded):
            self.last = self._sent


def call_parameters(parameters: Mapping[str, Parameter] | None, more: Mapping[str, Parameter]) -> dict[str, Any]:
    """Join the parameters of a request."""
    return {**(parameters or {}), **more}
