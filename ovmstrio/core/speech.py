"""Requests, results and service protocols of speech-to-text and text-to-speech models."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ovmstrio.core.generation import GenerativeService


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """One transcription request.

    Attributes:
        audio: content of an audio file.
        translates: whether the transcript is translated to English.
        language: language code such as ``en``; empty for detection.
        prompt: preceding text that guides spelling.
        temperature: sampling temperature; 0 is greedy.
        wants_segments: whether segments have timestamps.
        wants_words: whether words have timestamps.
        deadline: on trio's clock, queueing included.
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
class TimedText:
    """A segment or word with its start and end in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class TranscriptPart:
    """Transcript since the previous part; segments and words only if requested."""

    text: str
    segments: tuple[TimedText, ...] = ()
    words: tuple[TimedText, ...] = ()


class Transcript(Protocol):
    """A running transcription."""

    @property
    def language(self) -> str:
        """Language code such as ``en``; known after the first part."""

    @property
    def seconds(self) -> float:
        """Duration of the recording; known at the end."""

    def __aiter__(self) -> AsyncIterator[TranscriptPart]:
        """Iterate over parts; parts are buffered.

        Raises:
            InvalidField: the rest of the recording cannot be decoded.
            ServerError: the model or its process failed.

        Cancellation: leaving the block that opened the transcript cancels the request.
        """


class Transcriber(GenerativeService, Protocol):
    """A service with ``Task.SPEECH_TO_TEXT``."""

    def transcribe(self, request: TranscriptionRequest) -> AbstractAsyncContextManager[Transcript]:
        """Start a transcription; entering returns when the file has been opened.

        Leaving early cancels the request within one window of 30 s of audio.

        Raises:
            InvalidField: on entering: not an audio file, or unsupported options.
            Overloaded: on entering: the queue is full.
            ServerError: on entering or from the iteration, such as a process exit.
        """


class AudioFormat(Enum):
    """Audio formats; values are those of ``response_format``.

    ``PCM`` is 16-bit little-endian mono at 24 kHz without header; ``WAV`` has 32-bit floats.
    """

    WAV = "wav"
    PCM = "pcm"
    FLAC = "flac"
    MP3 = "mp3"
    OPUS = "opus"


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One text-to-speech request.

    Attributes:
        voice: name of the voice; empty for the default.
        language: language code such as ``en-us``; empty for the default.
        speed: speed factor; 1 is normal.
        is_streamed: whether the file is sent while it is generated, so that its header has no length.
        deadline: on trio's clock, queueing included.
    """

    text: str
    voice: str = ""
    language: str = ""
    speed: float = 1.0
    form: AudioFormat = AudioFormat.WAV
    is_streamed: bool = False
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class SpeechPart:
    """Audio of one sentence and its duration; a file that is not streamed comes with the last sentence."""

    audio: bytes
    seconds: float


class Speech(Protocol):
    """A running text-to-speech request."""

    def __aiter__(self) -> AsyncIterator[SpeechPart]:
        """Iterate over parts, one per sentence; a few parts are buffered.

        Raises:
            ServerError: the model or its process failed.

        Cancellation: leaving the block that opened the speech cancels the request.
        """


class SpeechSynthesizer(GenerativeService, Protocol):
    """A service with ``Task.TEXT_TO_SPEECH``."""

    def speak(self, asked: SpeechRequest) -> AbstractAsyncContextManager[Speech]:
        """Start a request; entering returns when it has been accepted.

        Leaving early cancels the request within one sentence.

        Raises:
            InvalidField: on entering: unknown voice, language or speed, or no words in the text.
            Overloaded: on entering: the queue is full.
            ServerError: on entering or from the iteration, such as a process exit.
        """
