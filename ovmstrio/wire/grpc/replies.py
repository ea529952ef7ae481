"""Header blocks written: response headers, trailers and refusals as HPACK bytes.

Only literals that are not indexed and entries of the static table are used. Such a block depends on no state, so the
usual ones are made once, whatever the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import ceil
from typing import Final

import structlog
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.metadata import encode_bin_value, encode_grpc_message

from ovmstrio.core.texts import text_of

__all__ = [
    "OK_TRAILERS",
    "RESPONSE_HEADERS",
    "TABLE_SIZE_ZERO",
    "ErrorMapper",
    "FailureTranslator",
    "Wakeup",
    "http_refusal_block",
    "metadata_block",
    "trailers_block",
    "trailers_only_block",
]

log = structlog.get_logger(__name__)

ErrorMapper = Callable[[Exception], GRPCError | None]


def single_error(error: Exception) -> Exception:
    """Unwrap groups that hold one error only, as nurseries make them."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class TrailedError(GRPCError):
    """A failure of which more is said in trailers.

    Args:
        status: what the client gets.
        message: likewise.
        pairs: names and values of the trailers.
    """

    def __init__(self, status: Status, message: str, *pairs: tuple[str, str]) -> None:
        super().__init__(status, message)
        self._pairs = pairs

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Give names and values of the trailers."""
        return self._pairs

    def trailers(self) -> bytes:
        """Encode what is said in trailers."""
        return metadata_block(self._pairs)


class RetryLater(TrailedError):
    """A failure that passes; clients whose retry policy has room for it try again then.

    It is said in gRPC's own word, and in HTTP's for those who read it.

    Args:
        status: what the client gets.
        message: likewise.
        seconds: when to try again, from now on.
    """

    def __init__(self, status: Status, message: str, seconds: float) -> None:
        pushback = ("grpc-retry-pushback-ms", str(round(seconds * 1000)))
        super().__init__(status, message, pushback, ("retry-after", str(ceil(seconds))))
        self.seconds = seconds


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
            return GRPCError(Status.CANCELLED, text_of(error))
        log.error("rpc handler failed", path=path, error=f"{type(error).__name__}: {text_of(error)}", exc_info=error)
        return GRPCError(Status.INTERNAL, f"{path}: the server failed on this call ({type(error).__name__})")

    def undecodable(self, error: Exception, message_type: type) -> GRPCError:
        """Find the answer for bytes that the codec could not read."""
        known = self._known(error)
        if known is not None:
            return known
        return GRPCError(
            Status.INVALID_ARGUMENT,
            f"request is not a valid {message_type.__name__}: {type(error).__name__}: {text_of(error)}",
        )

    def no_reply(self, path: str) -> GRPCError:
        """Find the answer for a unary call whose handler returned without one."""
        log.error("rpc handler sent no reply", path=path)
        return GRPCError(Status.INTERNAL, f"{path}: the server sent no reply")

    def _known(self, error: Exception) -> GRPCError | None:
        if isinstance(error, GRPCError):
            return error
        return self._map_error(error) if self._map_error is not None else None


class Wakeup:
    """A place where one task at a time waits until another task wakes it.

    Nothing is remembered: the waiter checks its condition, waits, and checks again, with no checkpoint between the
    check and the wait.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def waiting(self) -> bool:
        """Whether a task waits here."""
        return self._task is not None

    async def wait(self) -> None:
        """Wait for the next ``wake``.

        Raises:
            trio.BusyResourceError: another task waits here already.
        """
        if self._task is not None:
            raise trio.BusyResourceError("another task is waiting here already")
        self._task = trio.lowlevel.current_task()

        def give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)

    def wake(self) -> None:
        """Let the waiting task, if there is one, go on."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)


TABLE_SIZE_ZERO: Final = b"\x20"
"""The HPACK instruction by which this side says that it uses no dynamic table."""

_STATUS_200 = b"\x88"
_STATUS_NAME = b"\x08"
_CONTENT_TYPE_NAME = b"\x0f\x10"
_LONGEST_STRING_PREFIX = 127
# C-core refuses metadata above 8 KiB, and the caller would lose the status together with its text.
_LONGEST_MESSAGE_CHARACTERS: Final = 4_096


def _string(value: bytes) -> bytes:
    length = len(value)
    if length < _LONGEST_STRING_PREFIX:
        return bytes((length,)) + value
    prefix = [_LONGEST_STRING_PREFIX]
    length -= _LONGEST_STRING_PREFIX
    while length >= 128:  # noqa: PLR2004  # seven bits a byte
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + value


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _string(name) + _string(value)


def metadata_block(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Encode metadata that ``grpclib.metadata.encode_metadata`` has checked."""
    return b"".join(_literal(name.encode("ascii"), value.encode("ascii")) for name, value in pairs)


def trailers_block(status: Status, message: str | None, details: bytes | None = None) -> bytes:
    """Encode ``grpc-status``, the percent-encoded ``grpc-message`` and ``grpc-status-details-bin``."""
    block = _literal(b"grpc-status", b"%d" % status.value)
    if message:
        # Escapes only make it longer.
        begun = message[: _LONGEST_MESSAGE_CHARACTERS + 1]
        text = encode_grpc_message(begun.encode("utf-8", "replace").decode("utf-8"))
        if len(text) > _LONGEST_MESSAGE_CHARACTERS:
            text = text[:_LONGEST_MESSAGE_CHARACTERS]
            escape = text.rfind("%", _LONGEST_MESSAGE_CHARACTERS - 2)
            text = text if escape < 0 else text[:escape]
        block += _literal(b"grpc-message", text.encode("ascii"))
    if details is not None:
        block += _literal(b"grpc-status-details-bin", encode_bin_value(details))
    return block


def trailers_only_block(status: Status, message: str | None, details: bytes | None = None) -> bytes:
    """Encode the answer of a call that fails before anything was sent: headers and trailers in one."""
    return RESPONSE_HEADERS + trailers_block(status, message, details)


@lru_cache(maxsize=16)
def http_refusal_block(http_status: int, *extra: tuple[bytes, bytes]) -> bytes:
    """Encode the bare HTTP answer to a request that is not gRPC."""
    return (
        _STATUS_NAME
        + _string(b"%d" % http_status)
        + _literal(b"content-length", b"0")
        + b"".join(_literal(name, value) for name, value in extra)
    )


RESPONSE_HEADERS: Final = _STATUS_200 + _CONTENT_TYPE_NAME + _string(b"application/grpc")
OK_TRAILERS: Final = trailers_block(Status.OK, None)
