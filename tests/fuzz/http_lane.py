"""Requests over HTTP/1.1 on one connection, one behind the other without waiting, and answers read as they are."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple

from tests.fuzz.http_doors import http_bytes
from tests.fuzz.messages import Message, Outcome

SECONDS: Final = 20.0
_BODILESS: Final = {204, 304}
_HEAD_END: Final = b"\r\n\r\n"


class _Answer(NamedTuple):
    status: int
    body: bytes
    is_last: bool


class HttpReader:
    """Reads answers from a socket.

    Raises, from any method: EOFError where the connection ends before, TimeoutError where nothing comes for too long,
    ValueError where something comes that is no answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""

    def read(self, verb: str = "GET") -> _Answer:
        """Read the final answer to one request."""
        while (answer := self._read_one(verb)).status < 200:
            pass
        return answer

    def _read_one(self, verb: str) -> _Answer:
        first, *lines = self._until(_HEAD_END).decode("latin-1").split("\r\n")
        version, status = first.split(" ")[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(first)
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        is_last = "close" in fields.get("connection", "").lower()
        code = int(status)
        if verb == "HEAD" or code in _BODILESS or code < 200:
            return _Answer(code, b"", is_last)
        if "chunked" in fields.get("transfer-encoding", ""):
            return _Answer(code, self._chunks(), is_last)
        return _Answer(code, self._exactly(int(fields["content-length"])), is_last)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self._until(b"\r\n"), 16):
            parts.append(self._exactly(size + 2)[:-2])
        self._until(b"\r\n")
        return b"".join(parts)

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._unread:
            self._more()
        found, _, self._unread = self._unread.partition(mark)
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._more()
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def _more(self) -> None:
        try:
            data = self._connection.recv(65536)
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._unread += data


class HttpLane:
    """A connection that is replaced when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: socket.socket | None = None

    def close(self) -> None:
        """Close what is open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def begin(self, messages: Sequence[Message]) -> None:
        """Send requests; :meth:`end` reads their answers."""
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", self._port), timeout=SECONDS)
            self._reader = HttpReader(self._connection)
        last = next((at for at, message in enumerate(messages) if ("connection", "close") in message.headers), None)
        sent = messages if last is None else messages[: last + 1]
        with contextlib.suppress(OSError):
            self._connection.sendall(b"".join(map(http_bytes, sent)))

    def end(self, messages: Sequence[Message]) -> list[Outcome]:
        """Read what came of each; those behind a closed connection are sent again."""
        outcomes: list[Outcome] = []
        tried = 0
        while len(outcomes) < len(messages):
            message = messages[len(outcomes)]
            try:
                answer = self._reader.read(message.path.partition(" ")[0])
            except (EOFError, ValueError, OSError) as error:
                self.close()
                tried += 1
                if tried == 1:
                    # Alone, for what follows an answer on a connection that the server closes may cost that answer.
                    self.begin([message])
                    continue
                outcomes.append(Outcome())
                outcomes[-1].add_silence(f"no answer over HTTP: {error!r}")
            else:
                outcomes.append(Outcome())
                outcomes[-1].add_http(answer.status, answer.body)
                if answer.is_last:
                    self.close()
            if tried or self._connection is None:
                tried = 0
                self.begin(messages[len(outcomes) :])
        return outcomes


def tell_raw_http(port: int, data: bytes) -> Outcome:
    """Send bytes on a connection of their own, and read until the server has closed it."""
    outcome = Outcome()
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        reader = HttpReader(connection)
        try:
            while True:
                answer = reader.read()
                outcome.add_http(answer.status, answer.body)
        except TimeoutError:
            outcome.add_silence("a connection stays open over HTTP")
        except (EOFError, ValueError, KeyError, OSError):
            outcome.kinds.append("closed")
    return outcome
