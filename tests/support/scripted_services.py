"""Text, speech and embedding services with scripted answers that record their requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import trio

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core import generation
from ovmstrio.core.generation import Embeddings, Finish, GenerationChunk, GenerationRequest, Task, TokenIds
from ovmstrio.core.images import ImagePart, ImageRequest
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.speech import SpeechPart, SpeechRequest, TimedText, TranscriptionRequest, TranscriptPart
from tests.support.stub_registry import load_pass_through

CHAT, WORDS = "chat", "words"
LIMITS = generation.GenerationLimits(context_length=1000, vocabulary_size=300)
SPOKEN = (SpeechPart(b"head and first", 1.5), SpeechPart(b"", 0.25), SpeechPart(b"second\x00", 2.5))
IMAGES = (ImagePart((b"blurred",), (8, 16), is_partial=True), ImagePart((b"first", b"second"), (8, 16)))
TRANSCRIPT = (
    TranscriptPart(" Ever tried.", (TimedText(0.0, 1.5, " Ever tried."),), (TimedText(0.25, 0.75, " Ever"),)),
    TranscriptPart(" Ever --> failed.", (TimedText(1.5, 3723.0625, " Ever --> failed."),)),
)


class ScriptedAnswer:
    """Stream of the parts of a script; at events it sets ``waiting`` and waits, and it raises errors of the script."""

    language, seconds, cached_tokens = "en", 9.25, 1

    def __init__(self, steps: Iterable[Any], waiting: trio.Event, prompt_tokens: int = 0) -> None:
        self._steps = iter(steps)
        self._waiting = waiting
        self.prompt_tokens = prompt_tokens
        self.is_over = False

    def listen(self, take: Callable[[Iterable[Any]], bool]) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
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
class ScriptedService:
    """Service that records its requests; ``refusal`` rejects all, and a cancelled request sets ``left``.

    The first request sets ``arrived``.
    """

    name: str
    refusal: Exception | None = None
    requests: list[Any] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)
    left: trio.Event = field(default_factory=trio.Event)
    waiting: trio.Event = field(default_factory=trio.Event)
    running: int = 0

    @property
    def metadata(self) -> ServableMetadata:
        return ServableMetadata(self.name, "Scripted", (), ())

    @property
    def open_requests(self) -> int:
        return self.running

    def note(self, request: Any) -> None:
        self.requests.append(request)
        self.arrived.set()
        if self.refusal is not None:
            raise self.refusal

    @asynccontextmanager
    async def answering(self, request: Any, steps: Iterable[Any], prompt_tokens: int = 0) -> AsyncIterator[Any]:
        self.note(request)
        answer = ScriptedAnswer(steps, self.waiting, prompt_tokens)
        self.running += 1
        try:
            yield answer
        finally:
            self.running -= 1
            if not answer.is_over:
                self.left.set()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass
class ScriptedSpeaker(ScriptedService):
    steps: Sequence[SpeechPart | Exception | trio.Event] = SPOKEN
    tasks: frozenset[Task] = frozenset({Task.TEXT_TO_SPEECH})

    def speak(self, request: SpeechRequest) -> AbstractAsyncContextManager[Any]:
        return self.answering(request, self.steps)


@dataclass
class ScriptedImageGenerator(ScriptedService):
    steps: Sequence[ImagePart | Exception | trio.Event] = IMAGES
    tasks: frozenset[Task] = frozenset({Task.IMAGE_GENERATION})

    def generate_images(self, request: ImageRequest) -> AbstractAsyncContextManager[Any]:
        return self.answering(request, self.steps)


@dataclass
class ScriptedTranscriber(ScriptedService):
    steps: Sequence[TranscriptPart | Exception | trio.Event] = TRANSCRIPT
    tasks: frozenset[Task] = frozenset({Task.SPEECH_TO_TEXT})

    def transcribe(self, request: TranscriptionRequest) -> AbstractAsyncContextManager[Any]:
        return self.answering(request, self.steps)


def text_of_prompt(request: GenerationRequest) -> str:
    """Return the last message, the prompt, or the numbers of its tokens."""
    prompt = request.prompt
    if isinstance(prompt, generation.Conversation):
        return str(prompt.messages[-1]["content"])
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def echo(request: GenerationRequest) -> Iterator[GenerationChunk | Exception | trio.Event]:
    """Answer with the words of the last message, one a piece and a token."""
    for index in range(request.n):
        for number, word in enumerate(text_of_prompt(request).split()):
            yield GenerationChunk(index, word if number == 0 else f" {word}", tokens=1)
        yield GenerationChunk(index, finish=Finish.STOP)


@dataclass
class ScriptedGenerator(ScriptedService):
    name: str = CHAT
    limits: generation.GenerationLimits = LIMITS
    script: Callable[[GenerationRequest], Iterable[GenerationChunk | Exception | trio.Event]] = echo
    tasks: frozenset[Task] = frozenset({Task.TEXT_GENERATION})

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Any]:
        return self.answering(request, self.script(request), len(text_of_prompt(request).split()))


def text_spec(folder: Path, name: str = CHAT) -> TextModelSpec:
    folder.mkdir(exist_ok=True)
    return TextModelSpec(name=name, base_path=folder, path=folder)


@dataclass
class LetterEncoder(ScriptedService):
    """Encoder: the embedding is the length and the number of a's; the score is the share of the query's letters."""

    name: str = WORDS
    width: int = 4
    max_tokens: int | None = None
    tasks: frozenset[Task] = frozenset({Task.EMBEDDINGS, Task.RERANK})

    async def embed(
        self, inputs: Sequence[str | TokenIds], *, prompt_name: str | None = None, max_tokens: int | None = None
    ) -> Embeddings:
        await self._note(inputs)
        self.max_tokens = max_tokens
        inputs = inputs if max_tokens in {None, -1} else [each[:max_tokens] for each in inputs]
        vectors = np.zeros((len(inputs), self.width), np.float32)
        for row, each in zip(vectors, inputs, strict=True):
            row[:2] = len(each), each.count("a") if isinstance(each, str) else each.count(97)
        return Embeddings(vectors, sum(map(len, inputs)))

    async def rerank(
        self, query: str, documents: Sequence[str], *, max_tokens: int | None = None
    ) -> tuple[list[float], int]:
        await self._note((query, documents))
        documents = documents if max_tokens is None else [each[: max_tokens - len(query)] for each in documents]
        scores = [len(set(query) & set(each)) / len(set(query)) for each in documents]
        return scores, sum(len(query) + len(each) for each in documents)

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Any = None,
    ) -> list[TokenIds]:
        await self._note((texts, add_special_tokens, max_length, padding))
        return [tuple(map(ord, text)) for text in texts]

    async def detokenize(self, tokens: TokenIds) -> str:
        await self._note(tokens)
        return "".join(map(chr, tokens))

    async def _note(self, request: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.note(request)


async def load_encoder(spec: Any, version: int, directory: Path) -> Any:
    """Load a :class:`LetterEncoder` under the name ``words``, a generator of texts, or a stand-in of a model."""
    if not isinstance(spec, TextModelSpec):
        return await load_pass_through(spec, version, directory)
    await trio.lowlevel.checkpoint()
    return LetterEncoder(spec.name) if spec.name == WORDS else ScriptedGenerator(spec.name)
