"""Values of calls that write down speech, and the port of services that take them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from ovmstrio.core.generation import GenerativeService

__all__ = ["SpokenSpan", "Transcriber", "Transcript", "TranscriptPart", "TranscriptionRequest"]


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
