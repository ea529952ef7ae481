"""What was understood of a recording, as JSON, text, or the subtitles of a film."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.http import HttpAnswer
from ovmstrio.wire.http.answers import json_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.speech import SpokenSpan, Transcript, TranscriptPart

__all__ = ["WrittenDown"]

_TYPES: Final = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


@dataclass(slots=True)
class WrittenDown:
    """All that has come."""

    text: str = ""
    segments: list[SpokenSpan] = field(default_factory=list)
    words: list[SpokenSpan] = field(default_factory=list)
    language: str = ""
    seconds: float = 0.0

    def take(self, part: TranscriptPart) -> str:
        """Take one more part, and give its text as it belongs behind what has come before."""
        text = part.text if self.text else part.text.lstrip()
        self.text += text
        self.segments += part.segments
        self.words += part.words
        return text

    def finish(self, transcript: Transcript) -> None:
        """Take what is known at the end."""
        self.language, self.seconds = transcript.language, transcript.seconds

    @property
    def usage(self) -> dict[str, Any]:
        """Tell what is paid for elsewhere: the seconds, rounded up."""
        return {"type": "duration", "seconds": int(-(-self.seconds // 1))}

    def answer(self, form: str, granularities: frozenset[str], *, translates: bool, temperature: float) -> HttpAnswer:
        """Give all of it in the form that was asked for."""
        if form in _TYPES:
            return HttpAnswer(200, (("content-type", f"{_TYPES[form]}; charset=utf-8"),), self._plain(form).encode())
        document: dict[str, Any] = {"text": self.text.strip()}
        if form == "verbose_json":
            task = "translate" if translates else "transcribe"
            document = {"task": task, "language": self.language, "duration": round(self.seconds, 3), **document}
        if "segment" in granularities or (form == "verbose_json" and not granularities):
            document["segments"] = [_segment(*each, temperature) for each in enumerate(self.segments)]
        if "word" in granularities:
            document["words"] = [
                {"word": each.text.strip(), "start": each.start, "end": each.end} for each in self.words
            ]
        return json_answer({**document, "usage": self.usage})

    def _plain(self, form: str) -> str:
        if form == "text":
            return f"{self.text.strip()}\n"
        return _subtitles(self.segments, is_web=form == "vtt")


def _segment(number: int, span: SpokenSpan, temperature: float) -> dict[str, Any]:
    """Tell of a segment; the library gives no probabilities, so that these say nothing against it."""
    raw = span.text.encode()
    return {
        "id": number,
        "seek": int(span.start * 100),
        "start": span.start,
        "end": span.end,
        "text": span.text,
        "tokens": [],
        "temperature": temperature,
        "avg_logprob": 0.0,
        "compression_ratio": round(len(raw) / len(zlib.compress(raw)), 3) if raw else 0.0,
        "no_speech_prob": 0.0,
    }


def _subtitles(segments: Sequence[SpokenSpan], *, is_web: bool) -> str:
    """Write segments as WebVTT, or as SubRip's, which numbers them."""
    mark = "." if is_web else ","
    blocks = ["WEBVTT\n\n"] if is_web else []
    for number, each in enumerate(segments, start=1):
        head = "" if is_web else f"{number}\n"
        # A line that is empty, or an arrow, would end or begin something.
        text = " ".join(each.text.split()).replace("-->", "->")
        blocks.append(f"{head}{_time(each.start, mark)} --> {_time(each.end, mark)}\n{text}\n\n")
    return "".join(blocks)


def _time(seconds: float, mark: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{mark}{milliseconds:03}"
