"""A service that makes text as a test has written it down, and notes what became of each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.generation import Conversation, Finish, Generation, GenerationLimits, GenerationRequest, Piece, Task
from tests.support.pass_through import load_pass_through
from tests.support.scripted_steps import ScriptedService, ScriptedSteps

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
