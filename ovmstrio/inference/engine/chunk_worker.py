"""What programs have in common that answer requests part by part, in the order in which parts are asked for.

::

    ["open", number, what is asked]             ["accepted"] or ["refused", error]
    ["part", number]                            ["part", what was made] or ["refused", error]
    ["close", number]                           is not answered
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
from ovmstrio.inference.engine.messages import ACCEPTED, PART, REFUSED, encode_failure
from ovmstrio.isolation.blocking_channel import BlockingChannel, ChannelLost
from ovmstrio.isolation.process_exit import LOST_CHANNEL, LOST_MODEL, watch_lifeline
from ovmstrio.util.stdio import print_whole_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.isolation.channel import Message

__all__ = ["TurnProgram", "run_process"]

# ----------------------------------------------------------------------
# What programs have in common that answer requests part by part, in the order in which parts are asked for
# ----------------------------------------------------------------------

_OpenedT = TypeVar("_OpenedT")


class TurnProgram(Generic[_OpenedT]):
    """Serves one model.

    Args:
        channel: to the server.
    """

    def __init__(self, channel: BlockingChannel) -> None:
        self.channel = channel
        self._opened: dict[int, _OpenedT] = {}
        self._waiting: deque[Message | None] = deque()

    def run(self) -> None:
        """Serve until the server has nothing more to say."""
        while (message := self._waiting.popleft() if self._waiting else self.channel.receive()) is not None:
            number, (kind, request, *rest) = message.value
            if kind == "close":
                self._opened.pop(request, None)
                continue
            try:
                answer = self._open(request, *rest) if kind == "open" else self._make_part(request)
            except ServerError as error:
                answer = [REFUSED, encode_failure(error)]
            self.channel.send([number, answer])

    def _open(self, request: int, *asked: Any) -> list[Any]:
        self._opened[request] = self.open(*asked)
        return [ACCEPTED]

    def _make_part(self, request: int) -> list[Any]:
        opened = self._opened.get(request)
        if opened is None:
            # Its client has left in the moment in which the part before this one was done.
            raise ModelFailure("the request is closed")
        return [PART, self.make_part(request, opened)]

    @abstractmethod
    def open(self, *asked: Any) -> _OpenedT:
        """Begin a request.

        Raises:
            ServerError: it cannot be answered.
        """

    @abstractmethod
    def make_part(self, number: int, opened: _OpenedT) -> dict[str, Any]:
        """Make the next part of a request; ``is_last`` says whether it is the last one.

        Raises:
            ServerError: it cannot be answered any further.
        """

    def is_wanted(self, number: int) -> bool:
        """Tell whether there is still somebody who wants a request answered, by what the server has said since."""
        while self.channel.has_message() and (not self._waiting or self._waiting[-1] is not None):
            self._waiting.append(self.channel.receive())
        return not any(message is None or message.value[1][:2] == ["close", number] for message in self._waiting)


# ----------------------------------------------------------------------
# What all programs here begin and end with: the server's socket, its lifeline, and a status for what was wrong
# ----------------------------------------------------------------------


def run_process(serve: Callable[[BlockingChannel, int, Any], None]) -> None:
    """Serve the server whose socket is the first argument, and end the process.

    Args:
        serve: gets the channel, and the number and the value of the first message.
    """
    end, lifeline = map(int, sys.argv[1:3])
    watch_lifeline(lifeline)
    for meant_for_the_server in (signal.SIGINT, signal.SIGTERM):
        signal.signal(meant_for_the_server, _leave_it_to_the_server)
    print_whole_lines()
    channel = BlockingChannel(socket.socket(fileno=end))
    status = 0
    try:
        first = channel.receive()
        if first is not None:
            serve(channel, *first.value)
    except ChannelLost:
        status = LOST_CHANNEL
    except Exception:  # noqa: BLE001 - the server learns of it by the status
        traceback.print_exc()
        status = LOST_MODEL
    sys.stdout.flush()
    sys.stderr.flush()
    # What the library would still do takes long, and gives nobody anything.
    os._exit(status)


def _leave_it_to_the_server(*_: object) -> None:
    """Do nothing; an ignored signal would be ignored by processes that libraries start, too."""
