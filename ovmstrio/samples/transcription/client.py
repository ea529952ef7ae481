"""Client of the sample transcription: ``python -m ovmstrio.samples.transcription.client --input RECORDING...``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from openai import OpenAIError

from ovmstrio.samples.command_line import arguments
from ovmstrio.samples.openai_client import openai_client

__all__ = ["subtitles", "transcribe"]


def transcribe(url: str, recording: Path, *, model: str = "transcription") -> Iterator[str]:
    """Stream the text of a recording; ``url`` is the address of the server's REST port.

    Raises:
        OpenAIError: the server does not respond, refuses the request, or the response is incomplete.
    """
    with openai_client(url) as client, recording.open("rb") as file:
        for event in client.audio.transcriptions.create(model=model, file=file, stream=True):
            if event.type == "transcript.text.delta":
                yield event.delta


def subtitles(url: str, recording: Path, *, model: str = "transcription") -> str:
    """Return SubRip subtitles of a recording.

    Raises:
        OpenAIError: the server does not respond, refuses the request, or the response is incomplete.
    """
    with openai_client(url) as client, recording.open("rb") as file:
        return client.audio.transcriptions.create(model=model, file=file, response_format="srt")


if __name__ == "__main__":
    given = {"metavar": "RECORDING", "type": Path, "nargs": "+", "required": True, "help": "wav, flac, ogg or mp3"}
    timed = ("--subtitles", {"action": "store_true", "help": "print SubRip subtitles"})
    options = arguments(
        "What is said in these recordings?", timed, url="http://127.0.0.1:8000", model="transcription", given=given
    )
    try:
        for each in options.input:
            if options.subtitles:
                print(subtitles(options.url, each, model=options.model))
                continue
            for piece in transcribe(options.url, each, model=options.model):
                print(piece, end="", flush=True)
            print()
    except (OpenAIError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
