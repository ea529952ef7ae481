"""Values of calls that write down speech, or speak texts, and the ports of services that take them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ovmstrio.core.generation import GenerativeService

__all__ = [
    "SoundForm",
    "Speech",
    "SpeechPart",
    "SpeechRequest",
    "SpokenSpan",
    "TextSpeaker",
    "Transcriber",
    "Transcript",
    "TranscriptPart",
    "TranscriptionRequest",
]


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """A recording that is to be written down.

    Attributes:
        audio: a file of sound, as it came.
        translates: whether it is written down in English, whatever is spoken.
        language: that is spoken, as ``en``; empty for the one that the model hears.
        prompt: what might have been said before, by which names are spelt; empty for nothing.
        temperature: 0 for the likeliest token each time.
        wants_segments: whether it is told when each sentence or so was spoken.
        wants_words: whether it is told when each word was spoken.
        deadline: on trio's clock; counts from arrival, the queue included.
    """

    audio: bytes
    translates: bool = False
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    wants_segments: bool = False
    wants_words: bool = False
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class SpokenSpan:
    """What was said between two times, in seconds from the beginning: a segment, or a word."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class TranscriptPart:
    """What has been understood since the last part; segments and words only where they are asked for."""

    text: str
    segments: tuple[SpokenSpan, ...] = ()
    words: tuple[SpokenSpan, ...] = ()


class Transcript(Protocol):
    """A recording that is being written down."""

    @property
    def language(self) -> str:
        """What is spoken, as ``en``; known once there has been a part, or the end."""
        ...

    @property
    def seconds(self) -> float:
        """How long the recording is; known at its end."""
        ...

    def __aiter__(self) -> AsyncIterator[TranscriptPart]:
        """Give parts until the end of the recording; those that nobody takes wait.

        Raises:
            InvalidField: the recording cannot be read any further.
            ServerError: the model failed, or its process ended.

        Cancellation: while there is none; leaving the block that opened it ends the request.
        """
        ...


class Transcriber(GenerativeService, Protocol):
    """Writes down what is said; has ``Task.SPEECH_TO_TEXT``."""

    def transcribe(self, asked: TranscriptionRequest) -> AbstractAsyncContextManager[Transcript]:
        """Begin to write a recording down, once it is its turn; entering returns when the file has been opened.

        Leaving before the end ends the request, within a window of half a minute's sound.

        Raises:
            InvalidField: on entering: the file is no sound, or the model does not do what is asked.
            Overloaded: on entering: the queue is full.
            ServerError: on entering, or from the iteration, such as a process that ended.

        Cancellation: anywhere.
        """
        ...


# What speaks


class SoundForm(Enum):
    """The form of a file of sound; values are those of ``response_format``.

    ``PCM`` is 16 bits, 24 kHz, one channel, little-endian, without a head; ``WAV`` has 32-bit floats.
    """

    WAV = "wav"
    PCM = "pcm"
    FLAC = "flac"
    MP3 = "mp3"
    OPUS = "opus"


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A text that is to be spoken.

    Attributes:
        voice: whose; empty for the model's own.
        language: of the text, as ``en-us``; empty for the model's own.
        speed: 1 for as fast as the voice speaks, above for faster.
        is_streamed: whether the file is sent while it is made, so that its head does not tell its length.
        deadline: on trio's clock; counts from arrival, the queue included.
    """

    text: str
    voice: str = ""
    language: str = ""
    speed: float = 1.0
    form: SoundForm = SoundForm.WAV
    is_streamed: bool = False
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class SpeechPart:
    """What a sentence has added to the file, and how long it is spoken for.

    Of a file that is not streamed, all comes with the last sentence.
    """

    audio: bytes
    seconds: float


class Speech(Protocol):
    """A text that is being spoken."""

    def __aiter__(self) -> AsyncIterator[SpeechPart]:
        """Give a part for each sentence; no more than a few are made before somebody takes them.

        Raises:
            ServerError: the model failed, or its process ended.

        Cancellation: while there is none; leaving the block that opened it ends the request.
        """
        ...


class TextSpeaker(GenerativeService, Protocol):
    """Speaks texts; has ``Task.TEXT_TO_SPEECH``."""

    def speak(self, asked: SpeechRequest) -> AbstractAsyncContextManager[Speech]:
        """Begin to speak a text, once it is its turn; entering returns when the request has been accepted.

        Leaving before the end ends the request, within a sentence.

        Raises:
            InvalidField: on entering: the model has no such voice, language or speed, or the text has no words.
            Overloaded: on entering: the queue is full.
            ServerError: on entering, or from the iteration, such as a process that ended.

        Cancellation: anywhere.
        """
        ...
