"""What programs have in common that answer requests part by part, in the order in which parts are asked for.

::

    ["open", number, what is asked]             ["accepted"] or ["refused", error]
    ["part", number]                            ["part", what was made] or ["refused", error]
    ["close", number]                           is not answered
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ovmstrio.core.errors import ModelFailure, ServerError
from ovmstrio.openvino.engine.frames import ACCEPTED, PART, REFUSED, encode_failure

if TYPE_CHECKING:
    from ovmstrio.work.messages.blocking_channel import BlockingChannel
    from ovmstrio.work.messages.message_packets import Message

__all__ = ["TurnProgram"]

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
