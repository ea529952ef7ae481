"""The ``context`` of a call as handlers know it from gRPC's Python servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn

import structlog
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import encode_metadata

from ovmstrio.core.peers import UNKNOWN, UnixSocket
from ovmstrio.runtimes.handlers.grpc.ends import CallEndedError
from ovmstrio.runtimes.handlers.grpc.rpc_call import RpcCall

__all__ = ["HandlerContext", "Metadatum"]


def status_of_code(code: Any) -> Status:
    """Translate a ``grpc.StatusCode``, its number or its name.

    Raises:
        ValueError: there is no such status.
    """
    value = getattr(code, "value", code)
    number = value[0] if isinstance(value, tuple) else value
    try:
        return Status[number.upper()] if isinstance(number, str) else Status(number)
    except (KeyError, ValueError):
        raise ValueError(f"{code!r} is no status of gRPC; expected one of grpc.StatusCode") from None


log = structlog.get_logger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]
_NO_CODE: Final = Status.OK
_RICH_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata that belongs to the status itself."""


class Metadatum(NamedTuple):
    """One entry of metadata; the value of a key that ends in ``-bin`` is bytes."""

    key: str
    value: str | bytes


class HandlerContext:
    """What a handler's method gets as ``context``; every method may be called from any thread, and none waits."""

    def __init__(self, call: RpcCall) -> None:
        self._call = call
        self._loop = trio.lowlevel.current_trio_token()
        self._deadline = time.monotonic() + call.deadline - trio.current_time()
        self._received = tuple(Metadatum(*pair) for pair in call.metadata.items())
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], Any]] | None = []
        self._code = _NO_CODE
        self._given_code: Any = None
        self._details = ""
        self._rich_details: bytes | None = None
        self._headers: Collection[tuple[str, str | bytes]] | None = None
        self._headers_allowed = True
        self._headers_given = trio.Event()
        self._trailers: tuple[Metadatum, ...] = ()

    # About the call

    def is_active(self) -> bool:
        """Whether somebody still waits for the reply."""
        return self._callbacks is not None

    def time_remaining(self) -> float | None:
        """Give the seconds until the caller's deadline, None without one."""
        return None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[Metadatum, ...]:
        """Give the metadata that the caller sent, ``user-agent`` included."""
        agent = self._call.user_agent
        return (*self._received, Metadatum("user-agent", agent)) if agent else self._received

    def peer(self) -> str:
        """Return the client: ``ipv4:127.0.0.1:5000``, ``ipv6:[::1]:5000``, ``unix:`` or ``unknown``."""
        endpoint = self._call.client_endpoint
        if endpoint in {UnixSocket.endpoint, UNKNOWN.endpoint}:
            return endpoint
        return f"ipv6:{endpoint}" if endpoint.startswith("[") else f"ipv4:{endpoint}"

    # What the caller is told

    def code(self) -> Any:
        """Give the status as it was set, None before."""
        return self._given_code

    def details(self) -> str:
        """Give the text that was set, empty before."""
        return self._details

    def trailing_metadata(self) -> tuple[Metadatum, ...]:
        """Give the trailing metadata that was set."""
        return self._trailers

    def set_code(self, code: Any) -> None:
        """Set the status that the call ends with: a ``grpc.StatusCode``, or its number.

        Raises:
            ValueError: there is no such status.
        """
        self._code = status_of_code(code)
        self._given_code = code

    def set_details(self, details: str) -> None:
        """Set the text that goes with the status."""
        self._details = str(details)

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        """Set the metadata that goes with the status.

        Raises:
            ValueError: a key or a value cannot be sent.
            TypeError: a value is of the wrong type for its key.
        """
        entries = tuple(Metadatum(*pair) for pair in trailing_metadata)
        rich = [value for key, value in entries if key == _RICH_DETAILS and isinstance(value, bytes)]
        self._trailers = _checked(entry for entry in entries if entry.key != _RICH_DETAILS)
        self._rich_details = rich[-1] if rich else None

    def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        """Send metadata ahead of the first reply, at once; possible once.

        Raises:
            ValueError: it has been sent, alone or with a reply, or cannot be sent.
            TypeError: a value is of the wrong type for its key.
        """
        checked = _checked(initial_metadata)
        with self._lock:
            if not self._headers_allowed:
                raise ValueError("initial metadata can only be sent once, and before the first reply")
            self._headers_allowed = False
            self._headers = checked
        self._on_loop(self._headers_given.set)

    # The end

    def abort(self, code: Any, details: str = "") -> NoReturn:
        """End the call with a status other than OK, at once.

        Raises:
            CallEndedError: always, so that the method ends.
        """
        status = status_of_code(code)
        self._given_code = code
        self._code = Status.UNKNOWN if status is Status.OK else status
        self._details = "" if status is Status.OK else str(details)
        raise CallEndedError(f"aborted with {self._code.name}: {self._details}")

    def abort_with_status(self, status: Any) -> NoReturn:
        """End the call with a status that has its own code, text and trailing metadata, such as rich errors have.

        Raises:
            CallEndedError: always, so that the method ends.
        """
        self.set_trailing_metadata(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def cancel(self) -> None:
        """End the call with CANCELLED; the method is told to stop as if the caller had left."""
        self._on_loop(self._call.cancel)

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Have a function called in a thread when the call has ended, for whatever reason; False if it has already."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    # For the server, on the event loop

    def is_successful(self) -> bool:
        """Whether no status other than OK was set, so that a reply goes with it."""
        return self._code is _NO_CODE

    async def send_waiting_headers(self) -> None:
        """Send initial metadata that waits to be sent; later there can be none.

        Raises:
            StreamTerminatedError: the call is over.
        """
        with self._lock:
            headers, self._headers = self._headers, None
            self._headers_allowed = False
        if headers is not None:
            await self._call.send_initial_metadata(metadata=headers)

    async def watch_headers(self) -> None:
        """Send initial metadata as soon as there is some.

        Cancellation: while there is none.
        """
        await self._headers_given.wait()
        await self.send_waiting_headers()

    async def conclude(self, default: GRPCError | None, cause: Exception | None = None) -> None:
        """Say how the call ends: as the handler has set it, else as ``default`` says, which is None for success.

        ``cause`` is what the handler raised, if anything.

        Raises:
            GRPCError: it does not end well.
            StreamTerminatedError: the call is over.
        """
        await self.send_waiting_headers()
        await self._call.send_trailing_metadata(status_message=self._details or None, metadata=self._trailers)
        status = self._code
        if default is not None and status is _NO_CODE:
            status = default.status
        if status is not _NO_CODE:
            text = self._details or (default.message if default is not None else None)
            raise GRPCError(status, text, self._rich_details) from cause

    def end(self) -> Callable[[], None] | None:
        """Mark the call as over; gives what calls the callbacks, to be run in a thread, None without any."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        return (lambda: _call_all(callbacks, self._call.path)) if callbacks else None

    def _on_loop(self, function: Callable[[], Any]) -> None:
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(function)


def _checked(metadata: Metadata) -> tuple[Metadatum, ...]:
    pairs = tuple(Metadatum(*pair) for pair in metadata)
    encode_metadata(pairs)
    return pairs


def _call_all(callbacks: Iterable[Callable[[], Any]], path: str) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # the border of user code: the callbacks behind it are called all the same
            log.exception("a callback of a call raised", rpc=path)
