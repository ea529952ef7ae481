"""Client of the sample voice: ``python -m ovmstrio.samples.voice.client --input TEXT [--output FILE]``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from openai import OpenAIError

from ovmstrio.samples.command_line import arguments
from ovmstrio.samples.openai_client import openai_client

__all__ = ["speak"]

_FORMS: Final = ("wav", "mp3", "flac", "opus", "pcm")


def speak(
    url: str, text: str, *, form: str = "wav", speed: float = 1.0, voice: str = "joe", model: str = "voice"
) -> Iterator[bytes]:
    """Stream an audio file sentence by sentence; ``url`` is the address of the server's REST port.

    Raises:
        OpenAIError: the server does not respond, refuses the request, or the response is incomplete.
    """
    body: dict[str, Any] = {"model": model, "input": text, "voice": voice, "response_format": form, "speed": speed}
    with (
        openai_client(url) as client,
        client.audio.speech.with_streaming_response.create(**body) as answer,
    ):
        yield from answer.iter_bytes()


if __name__ == "__main__":
    said = {"metavar": "TEXT", "default": "Ever tried, ever failed. No matter. Try again, fail again, fail better."}
    file = ("--output", {"metavar": "FILE", "type": Path, "default": Path("speech.wav"), "help": ", ".join(_FORMS)})
    fast = ("--speed", {"type": float, "default": 1.0, "help": "speed of speech (default: %(default)s)"})
    who = ("--voice", {"default": "joe", "help": "name of the voice (default: %(default)s)"})
    options = arguments("Speak a text.", file, fast, who, url="http://127.0.0.1:8000", model="voice", given=said)
    kind = options.output.suffix.removeprefix(".")
    if kind not in _FORMS:
        raise SystemExit(f"error: --output: expected a suffix of {', '.join(_FORMS)}, got {kind!r}")
    try:
        pieces = speak(
            options.url, options.input, form=kind, speed=options.speed, voice=options.voice, model=options.model
        )
        first = next(pieces, b"")
        with options.output.open("wb") as written:
            written.write(first)
            written.writelines(pieces)
    except (OpenAIError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(options.output)
