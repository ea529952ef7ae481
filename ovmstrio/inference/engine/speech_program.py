"""The program that speaks: a sentence of one text at a time, in the order in which they are asked for.

::

    first                                ["loaded", facts] or ["failed", reason]
    ["open", number, text, asked]        as programs that answer in parts do
    ["part", number]                     ["part", sound of a sentence] or ["refused", error]
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.inference.engine.chunk_worker import TurnProgram, run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED, VOICE_FILES
from ovmstrio.inference.engine.pipeline import reason_of
from ovmstrio.inference.engine.tts import sentences_of
from ovmstrio.util.extras import Extra, way_to_install

if TYPE_CHECKING:
    from ovmstrio.inference.engine.audio_files import SoundWriter
    from ovmstrio.inference.engine.tts import Speaker
    from ovmstrio.isolation.blocking_channel import BlockingChannel

__all__ = ["serve"]

_MOST_WHOLE_SECONDS: Final = 1800
"""Of a file that is kept until its end, so that its head can tell its length."""


class _Spoken:
    """A text that is being spoken: its sentences that are left, and the file that they go into."""

    __slots__ = ("form", "is_streamed", "language", "seconds", "sentences", "speed", "voice", "writer")

    def __init__(self, sentences: list[str], asked: dict[str, Any]) -> None:
        self.sentences = deque(sentences)
        self.voice: str = asked["voice"]
        self.language: str = asked["language"]
        self.speed: float = asked["speed"]
        self.form: str = asked["form"]
        self.is_streamed: bool = asked["is_streamed"]
        self.writer: SoundWriter | None = None
        self.seconds = 0.0

    def lasts_longer(self, seconds: float) -> None:
        """Count what has been spoken.

        Raises:
            InvalidField: it is more than is kept of a whole file.
        """
        self.seconds += seconds
        if not self.is_streamed and self.seconds > _MOST_WHOLE_SECONDS:
            most = f"a whole file may be {_MOST_WHOLE_SECONDS // 60} minutes long"
            raise InvalidField(f"{most}: have it streamed (stream_format: audio), or shorten the input", field="input")


class _Program(TurnProgram[_Spoken]):
    def __init__(self, channel: BlockingChannel, speaker: Speaker) -> None:
        super().__init__(channel)
        self._speaker = speaker

    def open(self, *asked: Any) -> _Spoken:
        text, how = asked
        sentences = sentences_of(text)
        if not sentences:
            raise InvalidField("input has nothing that could be spoken", field="input")
        spoken = _Spoken(sentences, how)
        self._speaker.check(spoken.voice, spoken.language, spoken.speed)
        return spoken

    def make_part(self, number: int, opened: _Spoken) -> dict[str, Any]:
        from ovmstrio.inference.engine.audio_files import sound_writer  # noqa: PLC0415 - loaded by then

        del number
        sentence = opened.sentences.popleft()
        samples, rate = self._speaker.say(sentence, opened.voice, opened.language, opened.speed)
        opened.lasts_longer(len(samples) / rate)
        if opened.writer is None:
            opened.writer = sound_writer(opened.form, rate, is_streamed=opened.is_streamed)
        audio = opened.writer.write(samples)
        is_last = not opened.sentences
        if is_last:
            audio += opened.writer.close()
        return {"audio": audio, "seconds": len(samples) / rate, "is_last": is_last}


def _load(options: dict[str, Any]) -> Speaker:
    from ovmstrio.inference.engine.tts import (  # noqa: PLC0415 - what is not installed is told
        PipelineSpeaker,
        PiperSpeaker,
        UnusableVoice,
    )

    folder, device, properties = options["folder"], options["device"], options["properties"]
    networks = sorted(Path(folder).glob(VOICE_FILES))
    if len(networks) > 1:
        names = ", ".join(each.name for each in networks)
        raise UnusableVoice(f"the folder has several voices of Piper, {names}: give each a folder of its own")
    if networks:
        return PiperSpeaker(networks[0], device, properties)
    return PipelineSpeaker(folder, device, properties, options["voices"])


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Be the model that the first message names."""
    try:
        speaker = _load(options)
    except ImportError as error:
        message = f"{error.name or error} is not installed, which models that speak need: {way_to_install(Extra.LLM)}"
        channel.send([number, [FAILED, message]])
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, the server says why there is no model
        channel.send([number, [FAILED, reason_of(error)]])
        return
    channel.send([number, [LOADED, {"voices": list(speaker.voices)}]])
    _Program(channel, speaker).run()


if __name__ == "__main__":
    run_process(serve)
