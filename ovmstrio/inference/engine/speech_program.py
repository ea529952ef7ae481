"""Program of a speech-synthesis process: one sentence at a time, in the order of requests.

::

    first                                ["loaded", facts] or ["failed", reason]
    ["open", number, text, options]      see :mod:`.chunk_worker`
    ["part", number]                     ["part", audio of a sentence] or ["refused", error]
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.inference.engine.chunk_worker import ChunkWorker, run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED, VOICE_FILES
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.inference.engine.tts import split_sentences
from ovmstrio.util.extras import Extra, way_to_install

if TYPE_CHECKING:
    from ovmstrio.inference.engine.audio_files import AudioWriter
    from ovmstrio.inference.engine.tts import Speaker
    from ovmstrio.isolation.blocking_channel import BlockingChannel

_MAX_BUFFERED_SECONDS: Final = 1800  # limit of a file that is buffered to its end, so that its header has the length


class _Synthesis:
    def __init__(self, sentences: list[str], options: dict[str, Any]) -> None:
        self.sentences = deque(sentences)
        self.voice: str = options["voice"]
        self.language: str = options["language"]
        self.speed: float = options["speed"]
        self.form: str = options["form"]
        self.is_streamed: bool = options["is_streamed"]
        self.writer: AudioWriter | None = None
        self.seconds = 0.0

    def add_seconds(self, seconds: float) -> None:
        self.seconds += seconds
        if not self.is_streamed and self.seconds > _MAX_BUFFERED_SECONDS:
            limit = f"audio too long: limit {_MAX_BUFFERED_SECONDS // 60} minutes without streaming"
            raise InvalidField(f"{limit}; use stream_format: audio, or shorten the input", field="input")


class _Program(ChunkWorker[_Synthesis]):
    def __init__(self, channel: BlockingChannel, speaker: Speaker) -> None:
        super().__init__(channel)
        self._speaker = speaker

    def open(self, *arguments: Any) -> _Synthesis:
        text, options = arguments
        sentences = split_sentences(text)
        if not sentences:
            raise InvalidField("input has nothing speakable", field="input")
        synthesis = _Synthesis(sentences, options)
        self._speaker.check(synthesis.voice, synthesis.language, synthesis.speed)
        return synthesis

    def make_part(self, number: int, opened: _Synthesis) -> dict[str, Any]:
        from ovmstrio.inference.engine.audio_files import create_audio_writer  # noqa: PLC0415 - loaded by then

        del number
        sentence = opened.sentences.popleft()
        samples, rate = self._speaker.say(sentence, opened.voice, opened.language, opened.speed)
        opened.add_seconds(len(samples) / rate)
        if opened.writer is None:
            opened.writer = create_audio_writer(opened.form, rate, is_streamed=opened.is_streamed)
        audio = opened.writer.write(samples)
        is_last = not opened.sentences
        if is_last:
            audio += opened.writer.close()
        return {"audio": audio, "seconds": len(samples) / rate, "is_last": is_last}


def _load(options: dict[str, Any]) -> Speaker:
    from ovmstrio.inference.engine.tts import (  # noqa: PLC0415 - import errors are reported
        InvalidVoice,
        PipelineSpeaker,
        PiperSpeaker,
    )

    folder, device, properties = options["folder"], options["device"], options["properties"]
    networks = sorted(Path(folder).glob(VOICE_FILES))
    if len(networks) > 1:
        names = ", ".join(each.name for each in networks)
        raise InvalidVoice(f"the folder has several Piper voices, {names}: use one folder per voice")
    if networks:
        return PiperSpeaker(networks[0], device, properties)
    return PipelineSpeaker(folder, device, properties, options["voices"])


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Serve the model named in the first message."""
    try:
        speaker = _load(options)
    except ImportError as error:
        message = f"speech models require {error.name or error}, which is not installed: {way_to_install(Extra.LLM)}"
        channel.send([number, [FAILED, message]])
        return
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
        return
    channel.send([number, [LOADED, {"voices": list(speaker.voices)}]])
    _Program(channel, speaker).run()


if __name__ == "__main__":
    run_process(serve)
