"""Calls over one HTTP/2 connection, many at once, and connections of raw bytes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Final

from ovmstrio.wire.grpc import frames
from ovmstrio.wire.grpc.frames import ErrorCode
from tests.fuzz.grpc_doors import WATCH
from tests.fuzz.messages import Message, Outcome
from tests.support.bare_http2 import Answer, BareConnection, ConnectionEnded

SECONDS: Final = 20.0


class GrpcLane:
    """A connection that is replaced when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: BareConnection | None = None
        self._streams: list[int] = []
        self._is_over = False

    def close(self) -> None:
        """Close what is open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def begin(self, messages: Sequence[Message]) -> None:
        """Send calls; :meth:`end` reads their answers."""
        if self._connection is None:
            self._connection = BareConnection(self._port, timeout=SECONDS)
            self._is_over = False
        begun = [self._connection.begin(message.path, message.body, message.headers) for message in messages]
        self._streams = [stream for stream, _ in begun]
        with contextlib.suppress(ConnectionEnded):
            self._connection.send(b"".join(data for _, data in begun))

    def end(self, messages: Sequence[Message]) -> list[Outcome]:
        """Read what came of each; those without an answer on a connection that has ended are sent again, alone."""
        outcomes = [self._outcome(*each) for each in zip(messages, self._streams, strict=True)]
        if None in outcomes and len(messages) == 1:
            outcomes = [self._ended()]
        final = []
        for message, outcome in zip(messages, outcomes, strict=True):
            if outcome is None:
                self.close()
                self.begin([message])
                (outcome,) = self.end([message])  # noqa: PLW2901 - what is sent again has another outcome
            final.append(outcome)
        return final

    def _ended(self) -> Outcome:
        outcome = Outcome()
        connection = self._connection
        if connection is not None and connection.goaway is not None:
            outcome.add_reset("connection ended", int.from_bytes(connection.goaway.payload[4:8]))
        else:
            outcome.add_silence("no answer over gRPC")
        self.close()
        return outcome

    def _outcome(self, message: Message, stream: int) -> Outcome | None:
        connection = self._connection
        if connection is None or self._is_over:
            return None
        answer = connection.answers[stream]
        try:
            while not answer.ended:
                if message.path == WATCH and answer.data:
                    # It would last as long as its client.
                    connection.send(frames.rst_stream(stream, ErrorCode.CANCEL))
                    answer.headers.setdefault("grpc-status", "0")
                    break
                connection.take(connection.read())
        except (ConnectionEnded, TimeoutError):
            self._is_over = True
            return None
        del connection.answers[stream]
        outcome = Outcome()
        _note(outcome, answer)
        return outcome


def _note(outcome: Outcome, answer: Answer) -> None:
    if answer.reset is not None:
        outcome.add_reset("reset", answer.reset)
    elif answer.headers.get(":status", "200") != "200":
        outcome.add_http(int(answer.headers[":status"]), bytes(answer.data))
    else:
        outcome.add_grpc(answer.status, answer.headers.get("grpc-message", ""))


def tell_raw_http2(port: int, data: bytes) -> Outcome:
    """Send bytes on a connection of their own, and read until the server has closed it."""
    outcome = Outcome()
    connection = BareConnection(port, timeout=SECONDS, greets=False)
    connection.answers = _Answers()
    with connection:
        with contextlib.suppress(ConnectionEnded, OSError):
            connection.send(data)
            connection.socket.shutdown(socket.SHUT_WR)
        try:
            while True:
                connection.take(connection.read())
        except TimeoutError:
            outcome.add_silence("a connection stays open over HTTP/2")
        except (ConnectionEnded, OSError):
            outcome.kinds.append("closed")
    for answer in connection.answers.values():
        if answer.ended:
            _note(outcome, answer)
    if connection.goaway is not None:
        outcome.add_reset("connection ended", int.from_bytes(connection.goaway.payload[4:8]))
    return outcome


class _Answers(dict[int, Answer]):
    """Answers to calls that nobody has counted."""

    def get(self, key: int, default: Answer | None = None) -> Answer:  # type: ignore[override]
        del default
        return self.setdefault(key, Answer())
