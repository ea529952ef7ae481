"""Program of a transcription process: one window of a recording at a time, in the order of requests.

::

    first                                         ["loaded", facts] or ["failed", reason]
    ["open", number, file, options]               see :mod:`.chunk_worker`
    ["part", number]                              ["part", window] or ["refused", error]
    number 0, during a short recording            [number, text]
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.inference.engine.chunk_worker import ChunkWorker, run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.util.extras import Extra, install_command

if TYPE_CHECKING:
    from ovmstrio.inference.engine.asr import SpeechRecognizer, TranscriptionOptions
    from ovmstrio.inference.engine.audio_files import AudioReader
    from ovmstrio.isolation.blocking_channel import BlockingChannel

_UNSOLICITED: Final = 0


class _Opened:
    __slots__ = ("position", "recording", "wanted")

    def __init__(self, recording: AudioReader, wanted: TranscriptionOptions) -> None:
        self.recording = recording
        self.wanted = wanted
        self.position = 0


class _Program(ChunkWorker[_Opened]):
    def __init__(self, channel: BlockingChannel, hearing: SpeechRecognizer) -> None:
        super().__init__(channel)
        self._hearing = hearing

    def open(self, *arguments: Any) -> _Opened:
        from ovmstrio.inference.engine.asr import TranscriptionOptions  # noqa: PLC0415 - loaded by then
        from ovmstrio.inference.engine.audio_files import AudioReader  # noqa: PLC0415 - loaded by then

        data, wanted = arguments
        options = TranscriptionOptions(**wanted)
        self._hearing.check(options)
        return _Opened(AudioReader(data), options)

    def make_part(self, number: int, opened: _Opened) -> dict[str, Any]:
        from ovmstrio.inference.engine.audio_files import SAMPLE_RATE  # noqa: PLC0415 - loaded by then

        start, length = opened.position, self._hearing.window
        sound = opened.recording.window(start, length)
        is_last = opened.recording.ends_at(start + length)
        transcript = self._hearing.hear(
            sound,
            opened.wanted,
            is_first=not start,
            is_last=is_last,
            on_text=lambda text: self._send_text(number, text),
        )
        opened.position += transcript.samples
        return {
            **asdict(transcript),
            "start": start / SAMPLE_RATE,
            "is_last": is_last,
            "seconds": opened.recording.seconds,
        }

    def _send_text(self, number: int, text: str) -> bool:
        if text:
            self.channel.send([_UNSOLICITED, [number, text]])
        return self.is_wanted(number)


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Serve the model named in the first message."""
    try:
        from ovmstrio.inference.engine.asr import SpeechRecognizer  # noqa: PLC0415 - import errors are reported
    except ImportError as error:
        message = f"audio files require {error.name or error}, which is not installed: {install_command(Extra.LLM)}"
        channel.send([number, [FAILED, message]])
        return
    try:
        hearing = SpeechRecognizer(
            options["folder"],
            options["device"],
            options["properties"],
            has_word_timestamps=options["has_word_timestamps"],
        )
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
        return
    facts = {"languages": sorted(hearing.languages), "window": hearing.window}
    channel.send([number, [LOADED, facts]])
    _Program(channel, hearing).run()


if __name__ == "__main__":
    run_process(serve)
