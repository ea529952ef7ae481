"""Services of texts, speech and vectors that answer as a test has written down, and record their requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.generation import (
    Conversation,
    Embeddings,
    Finish,
    Generation,
    GenerationLimits,
    GenerationRequest,
    Padding,
    Piece,
    Task,
    TokenIds,
)
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.speech import SpeechPart, SpeechRequest, SpokenSpan, TranscriptionRequest, TranscriptPart
from tests.support.stub_registry import load_pass_through

PartT = TypeVar("PartT")
AskedT = TypeVar("AskedT")


class _Steps(Protocol):
    is_over: bool


StepsT = TypeVar("StepsT", bound=_Steps)


class ScriptedSteps(Generic[PartT]):
    """Gives the parts of a script; waits at its events, and raises its errors.

    Args:
        steps: the script.
        waiting: is set when the script has come to an event.
    """

    def __init__(self, steps: Iterable[PartT | trio.Event | Exception], waiting: trio.Event) -> None:
        self._steps = iter(steps)
        self._waiting = waiting
        self.is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PartT:
        for step in self._steps:
            if isinstance(step, trio.Event):
                self._waiting.set()
                await step.wait()
            elif isinstance(step, Exception):
                self.is_over = True
                raise step
            else:
                await trio.lowlevel.checkpoint()
                return step
        self.is_over = True
        raise StopAsyncIteration


@dataclass
class ScriptedService(Generic[AskedT]):
    """What services have in common that answer as a test has written down.

    Attributes:
        refusal: what every request is refused with.
        requests: everything that it was asked.
        left: set when a request was left before its end.
        waiting: set when a request waits for an event.
    """

    name: str
    refusal: Exception | None = None
    requests: list[AskedT] = field(default_factory=list)
    left: trio.Event = field(default_factory=trio.Event)
    waiting: trio.Event = field(default_factory=trio.Event)

    @property
    def metadata(self) -> ServableMetadata:
        return ServableMetadata(self.name, "Scripted", (), ())

    def note(self, asked: AskedT) -> None:
        self.requests.append(asked)
        if self.refusal is not None:
            raise self.refusal

    @asynccontextmanager
    async def answering(self, running: StepsT) -> AsyncIterator[StepsT]:
        try:
            yield running
        finally:
            if not running.is_over:
                self.left.set()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


SPOKEN = (SpeechPart(b"head and first", 1.5), SpeechPart(b"", 0.25), SpeechPart(b"second\x00", 2.5))


@dataclass
class ScriptedSpeaker(ScriptedService["SpeechRequest"]):
    """Answers every request with the same steps: parts, errors, and events that it waits for."""

    steps: Sequence[SpeechPart | Exception | trio.Event] = SPOKEN
    tasks: frozenset[Task] = frozenset({Task.TEXT_TO_SPEECH})

    @asynccontextmanager
    async def speak(self, asked: SpeechRequest) -> AsyncIterator[Any]:
        self.note(asked)
        async with self.answering(ScriptedSteps[SpeechPart](self.steps, self.waiting)) as running:
            yield running


PARTS = (
    TranscriptPart(" Ever tried.", (SpokenSpan(0.0, 1.5, " Ever tried."),), (SpokenSpan(0.25, 0.75, " Ever"),)),
    TranscriptPart(" Ever --> failed.", (SpokenSpan(1.5, 3723.0625, " Ever --> failed."),)),
)


@dataclass
class ScriptedTranscriber(ScriptedService["TranscriptionRequest"]):
    """Answers every request with the same steps: parts, errors, and events that it waits for."""

    steps: Sequence[TranscriptPart | Exception | trio.Event] = PARTS
    tasks: frozenset[Task] = frozenset({Task.SPEECH_TO_TEXT})

    @asynccontextmanager
    async def transcribe(self, asked: TranscriptionRequest) -> AsyncIterator[Any]:
        self.note(asked)
        async with self.answering(_Scripted(self)) as running:
            yield running


class _Scripted(ScriptedSteps[TranscriptPart]):
    language = "en"
    seconds = 9.25

    def __init__(self, service: ScriptedTranscriber) -> None:
        super().__init__(service.steps, service.waiting)


CHAT = "chat"
"""The name under which :func:`load_generator` gives a :class:`ScriptedGenerator`; any other model is a stand-in."""

LIMITS = GenerationLimits(context_length=1000, vocabulary_size=300)

Step = Piece | Exception | trio.Event
"""What a generation does: it gives a piece, fails, or waits."""


def text_of_prompt(asked: GenerationRequest) -> str:
    """Give the last message, the prompt, or the numbers of its tokens."""
    prompt = asked.prompt
    if isinstance(prompt, Conversation):
        return str(prompt.messages[-1]["content"])
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def said_back(asked: GenerationRequest) -> Iterator[Step]:
    """Say the words of the last message, one a piece and a token."""
    for index in range(asked.n):
        words = text_of_prompt(asked).split()
        for number, word in enumerate(words):
            yield Piece(index, word if number == 0 else f" {word}", tokens=1)
        yield Piece(index, finish=Finish.STOP)


@dataclass
class ScriptedGenerator(ScriptedService["GenerationRequest"]):
    """Answers every request as ``script`` says, or refuses it with ``refusal``.

    Attributes:
        running: how many requests are being answered.
    """

    name: str = CHAT
    limits: GenerationLimits = LIMITS
    script: Callable[[GenerationRequest], Iterable[Step]] = said_back
    tasks: frozenset[Task] = frozenset({Task.TEXT_GENERATION})
    running: int = 0

    @asynccontextmanager
    async def generate(self, asked: GenerationRequest) -> AsyncIterator[Generation]:
        self.note(asked)
        self.running += 1
        try:
            async with self.answering(_Scripted(self, asked)) as generation:
                yield generation
        finally:
            self.running -= 1


class _Scripted(ScriptedSteps[Piece]):
    def __init__(self, service: ScriptedGenerator, asked: GenerationRequest) -> None:
        super().__init__(service.script(asked), service.waiting)
        self.prompt_tokens = len(text_of_prompt(asked).split())
        self.cached_tokens = 1


def text_spec(folder: Path, name: str = CHAT) -> TextModelSpec:
    folder.mkdir(exist_ok=True)
    return TextModelSpec(name=name, base_path=folder, path=folder)


async def load_generator(spec: Any, version: int, directory: Path) -> Any:
    """Load a scripted generator for what is configured as one, and a stand-in of a model for all else."""
    if isinstance(spec, TextModelSpec):
        await trio.lowlevel.checkpoint()
        return ScriptedGenerator(spec.name)
    return await load_pass_through(spec, version, directory)


WORDS = "words"
"""The name under which :func:`load_encoder` gives a :class:`LetterEncoder`; any other text model makes text."""


@dataclass
class LetterEncoder:
    """A text's vector is its length, and how often it has an a; its score is what share of the query's letters it has.

    Attributes:
        width: how many numbers vectors have; what is more than two is 0.
        asked: everything that it was asked.
        refusal: what it refuses everything with.
    """

    name: str = WORDS
    width: int = 4
    tasks: frozenset[Task] = frozenset({Task.EMBEDDINGS, Task.RERANK})
    asked: list[Any] = field(default_factory=list)
    refusal: Exception | None = None

    @property
    def metadata(self) -> ServableMetadata:
        return ServableMetadata(self.name, "Letters", (), ())

    async def embed(self, inputs: Sequence[str | TokenIds]) -> Embeddings:
        await self._note(inputs)
        vectors = np.zeros((len(inputs), self.width), np.float32)
        for row, each in zip(vectors, inputs, strict=True):
            row[:2] = len(each), each.count("a") if isinstance(each, str) else each.count(97)
        return Embeddings(vectors, sum(map(len, inputs)))

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        await self._note((query, documents))
        scores = [len(set(query) & set(each)) / len(set(query)) for each in documents]
        return scores, sum(len(query) + len(each) for each in documents)

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> list[TokenIds]:
        await self._note((texts, add_special_tokens, max_length, padding))
        return [tuple(map(ord, text)) for text in texts]

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    async def _note(self, what: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.asked.append(what)
        if self.refusal is not None:
            raise self.refusal


async def load_encoder(spec: Any, version: int, directory: Path) -> Any:
    """Load such a service, a generator of texts, or a stand-in of a model."""
    if not isinstance(spec, TextModelSpec):
        return await load_pass_through(spec, version, directory)
    await trio.lowlevel.checkpoint()
    return LetterEncoder(spec.name) if spec.name == WORDS else ScriptedGenerator(spec.name)
