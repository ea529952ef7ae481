"""Base of worker programs that answer requests part by part, in the order in which parts are requested.

::

    ["open", number, request]                   ["accepted"] or ["refused", error]
    ["part", number]                            ["part", result] or ["refused", error]
    ["close", number]                           not answered
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ovmstrio.core.errors import ModelFailure, ServerError
from ovmstrio.inference.engine.messages import ACCEPTED, PART, REJECTED, encode_failure
from ovmstrio.isolation.blocking_channel import BlockingChannel, ChannelClosedByUserCode
from ovmstrio.isolation.exit_status import CHANNEL_CLOSED, MODEL_LOST, exit_with_parent
from ovmstrio.util.stdio import install_line_buffering

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.isolation.messages import Message

_OpenedT = TypeVar("_OpenedT")


class ChunkWorker(Generic[_OpenedT]):
    """Serves one model on a channel."""

    def __init__(self, channel: BlockingChannel) -> None:
        self.channel = channel
        self._opened: dict[int, _OpenedT] = {}
        self._waiting: deque[Message | None] = deque()

    def run(self) -> None:
        """Serve until the server closes its side."""
        while (message := self._waiting.popleft() if self._waiting else self.channel.receive()) is not None:
            self._answer(message)

    def _answer(self, message: Message) -> None:
        answer: list[Any]
        number, (kind, request, *rest) = message.value
        if kind == "close":
            self._opened.pop(request, None)
            return
        try:
            if kind == "open":
                self._opened[request] = self.open(*rest)
                answer = [ACCEPTED]
            else:
                answer = self._make_part(request)
        except ServerError as error:
            answer = [REJECTED, encode_failure(error)]
        self.channel.send([number, answer])

    def _make_part(self, request: int) -> list[Any]:
        opened = self._opened.get(request)
        if opened is None:
            # The client disconnected while the previous part was computed.
            raise ModelFailure("the request is closed")
        return [PART, self.make_part(request, opened)]

    @abstractmethod
    def open(self, *arguments: Any) -> _OpenedT:
        """Start a request; raise ServerError if it is rejected."""

    @abstractmethod
    def make_part(self, number: int, opened: _OpenedT) -> dict[str, Any]:
        """Return the next part of a request, with ``is_last`` for the last one; raise ServerError if it failed."""

    def is_wanted(self, number: int) -> bool:
        """Return whether a request is still open, after reading pending messages and opening further requests."""
        while self.channel.has_message() and (not self._waiting or self._waiting[-1] is not None):
            message = self.channel.receive()
            if message is not None and message.value[1][0] == "open":
                # An invalid request is refused at once.
                self._answer(message)
            else:
                self._waiting.append(message)
        return not any(message is None or message.value[1][:2] == ["close", number] for message in self._waiting)


def run_process(serve: Callable[[BlockingChannel, int, Any], None]) -> None:
    """Pass the first message of the socket ``argv[1]`` to ``serve``, then end the process."""
    end, lifeline = map(int, sys.argv[1:3])
    exit_with_parent(lifeline)
    for server_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(server_signal, _ignore_signal)
    install_line_buffering()
    channel = BlockingChannel(socket.socket(fileno=end))
    status = 0
    try:
        first = channel.receive()
        if first is not None:
            serve(channel, *first.value)
    except ChannelClosedByUserCode:
        status = CHANNEL_CLOSED
    except Exception:  # noqa: BLE001 - reported by the exit status
        traceback.print_exc()
        status = MODEL_LOST
    sys.stdout.flush()
    sys.stderr.flush()
    # The library's own cleanup is slow and unnecessary.
    os._exit(status)


def _ignore_signal(*_: object) -> None:
    """Do nothing; SIG_IGN would be inherited by processes that libraries start."""
