"""The program that writes speech down: a window of one recording at a time, in the order in which they are asked for.

::

    first                                       ["loaded", facts] or ["failed", reason]
    ["open", number, file, wanted]              ["accepted"] or ["refused", error]
    ["window", number]                          ["heard", window] or ["refused", error]
    ["close", number]                           is not answered
    number 0, while a short recording is heard  [number, text]
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ModelFailure, ServerError
from ovmstrio.core.extras import Extra, way_to_install
from ovmstrio.openvino.engine.frames import ACCEPTED, FAILED, HEARD, LOADED, REFUSED, encode_failure
from ovmstrio.openvino.engine.library_errors import reason_of
from ovmstrio.openvino.engine.own_process import run_process

if TYPE_CHECKING:
    from ovmstrio.openvino.engine.hearing import Hearing, Wanted
    from ovmstrio.openvino.engine.recordings import Recording
    from ovmstrio.work.messages.blocking_channel import BlockingChannel
    from ovmstrio.work.messages.message_packets import Message

__all__ = ["serve"]

_TELL: Final = 0


class _Opened:
    """A recording that is being heard, and from which sample on."""

    __slots__ = ("position", "recording", "wanted")

    def __init__(self, recording: Recording, wanted: Wanted) -> None:
        self.recording = recording
        self.wanted = wanted
        self.position = 0


class _Program:
    def __init__(self, channel: BlockingChannel, hearing: Hearing) -> None:
        self._channel = channel
        self._hearing = hearing
        self._opened: dict[int, _Opened] = {}
        self._waiting: deque[Message | None] = deque()

    def run(self) -> None:
        """Serve until the server has nothing more to say."""
        while (message := self._waiting.popleft() if self._waiting else self._channel.receive()) is not None:
            number, (kind, recording, *rest) = message.value
            if kind == "close":
                self._opened.pop(recording, None)
                continue
            try:
                answer = self._open(recording, *rest) if kind == "open" else self._hear(recording)
            except ServerError as error:
                answer = [REFUSED, encode_failure(error)]
            self._channel.send([number, answer])

    def _open(self, number: int, data: bytes, wanted: dict[str, Any]) -> list[Any]:
        from ovmstrio.openvino.engine.hearing import Wanted  # noqa: PLC0415 - loaded by then
        from ovmstrio.openvino.engine.recordings import Recording  # noqa: PLC0415 - loaded by then

        asked = Wanted(**wanted)
        self._hearing.check(asked)
        self._opened[number] = _Opened(Recording(data), asked)
        return [ACCEPTED]

    def _hear(self, number: int) -> list[Any]:
        from ovmstrio.openvino.engine.recordings import RATE  # noqa: PLC0415 - loaded by then

        opened = self._opened.get(number)
        if opened is None:
            # Its client has left in the moment in which the window before this one was done.
            raise ModelFailure("the recording is closed")
        start, length = opened.position, self._hearing.window
        sound = opened.recording.window(start, length)
        is_last = opened.recording.ends_at(start + length)
        heard = self._hearing.hear(
            sound, opened.wanted, is_first=not start, is_last=is_last, tell=lambda text: self._tell(number, text)
        )
        opened.position += heard.samples
        return [
            HEARD,
            {**asdict(heard), "start": start / RATE, "is_last": is_last, "seconds": opened.recording.seconds},
        ]

    def _tell(self, number: int, text: str) -> bool:
        """Tell of text, and whether there is still somebody who wants it."""
        if text:
            self._channel.send([_TELL, [number, text]])
        while self._channel.has_message() and (not self._waiting or self._waiting[-1] is not None):
            self._waiting.append(self._channel.receive())
        gone = any(message is None or message.value[1][:2] == ["close", number] for message in self._waiting)
        return not gone


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Be the model that the first message names."""
    try:
        from ovmstrio.openvino.engine.hearing import Hearing  # noqa: PLC0415 - what is not installed is told
    except ImportError as error:
        message = f"{error.name or error} is not installed, which reads files of sound: {way_to_install(Extra.LLM)}"
        channel.send([number, [FAILED, message]])
        return
    try:
        hearing = Hearing(
            options["folder"], options["device"], options["properties"], tells_words=options["tells_words"]
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the server says why there is no model
        channel.send([number, [FAILED, reason_of(error)]])
        return
    facts = {"languages": sorted(hearing.languages), "window": hearing.window}
    channel.send([number, [LOADED, facts]])
    _Program(channel, hearing).run()


if __name__ == "__main__":
    run_process(serve)
