"""A model that makes text, as the server sees it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import GenerationLimits, Task, prompt_too_long
from ovmstrio.core.request import ServableMetadata
from ovmstrio.runtimes.generation.engine_link import EngineLink, OpenAnswer
from ovmstrio.runtimes.generation.output_reading import AnswerReading, OutputReading
from ovmstrio.runtimes.generation.proposing import check_proposing
from ovmstrio.runtimes.resident import ResidentService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from typing import Self

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.generation import GenerationRequest, Padding, Piece, TokenRow
    from ovmstrio.runtimes.generation.replacing import Handover
    from ovmstrio.runtimes.generation.sharing.choosing_engine import Engine

__all__ = ["RunningGeneration", "TextModel"]

PLATFORM = "openvino_genai"


class RunningGeneration:
    """A request that is being answered; see :class:`ovmstrio.core.generation.Generation`."""

    def __init__(self, opened: OpenAnswer, reading: AnswerReading) -> None:
        self._answer = opened.answer
        self._reading = reading
        reading.begin(opened.prompt_end)
        self.prompt_tokens = opened.prompt_tokens
        self.cached_tokens = opened.cached_tokens

    # No generator, which whoever leaves a loop early would have to close.
    def __aiter__(self) -> Self:
        """Give pieces until each text has had its last one."""
        return self

    async def __anext__(self) -> Piece:
        """Wait for the next piece; see :meth:`Answer.take`."""
        while (piece := self._reading.next()) is None:
            made = await self._answer.take()
            if made is None:
                raise StopAsyncIteration
            self._reading.feed(made)
        return piece


class TextModel(ResidentService):
    """One model; a :class:`TextGenerator` and a :class:`Tokenizer`.

    Args:
        spec: how it is configured.
        process: where its engine lives.
        link: what asks it.
        handover: what comes after it.
    """

    def __init__(self, spec: TextModelSpec, process: Engine, link: EngineLink, handover: Handover[TextModel]) -> None:
        super().__init__()
        self._handover = handover
        self._spec = spec
        self._process = process
        self._link = link
        self._limits = GenerationLimits(
            context_length=process.facts["context_length"],
            max_tokens_limit=spec.max_tokens_limit,
            best_of_limit=spec.best_of_limit,
            vocabulary_size=process.facts["vocabulary_size"],
            longest_token=process.facts["longest_token"],
        )
        self._reading = OutputReading(spec, process.facts["chat_template"])
        self._metadata = ServableMetadata(spec.name, PLATFORM, (), ())

    @property
    def metadata(self) -> ServableMetadata:
        """What it tells of itself: no tensors."""
        return self._metadata

    @property
    def tasks(self) -> frozenset[Task]:
        """It makes text."""
        return frozenset({Task.TEXT_GENERATION})

    @property
    def limits(self) -> GenerationLimits:
        """What it can take."""
        return self._limits

    @property
    def obstacle(self) -> str:
        """Why it cannot answer now; empty if it can."""
        return self._handover.obstacle or self._process.obstacle

    @property
    def pid(self) -> int | None:
        """The number of its engine's process, None while there is none."""
        return self._process.pid

    @property
    def facts(self) -> dict[str, Any]:
        """What its engine does now, for those who look."""
        return {"engine process": self._process.place, **self._link.facts}

    @property
    def open_requests(self) -> int:
        """How many requests run or wait."""
        return self._link.open

    @asynccontextmanager
    async def generate(self, asked: GenerationRequest) -> AsyncIterator[RunningGeneration]:
        """Begin to answer, as :meth:`TextGenerator.generate` says."""
        async with self._handover.using() as successor:
            if successor is not None:
                async with successor.generate(asked) as generation:
                    yield generation
                return
            self._check(asked)
            prepare = partial(self._reading.prepare, asked)
            is_slow = self._reading.is_slow(asked)
            asked, reading = await trio.to_thread.run_sync(prepare) if is_slow else prepare()
            process = await self._process.ready()
            async with self._link.ask(process, asked) as opened:
                yield RunningGeneration(opened, reading)

    def _check(self, asked: GenerationRequest) -> None:
        """See that a request asks for no more than the model's settings allow.

        Raises:
            InvalidField: it does.
        """
        limits, sampling = self._limits, asked.sampling
        if asked.prompt_characters > limits.max_characters:
            raise prompt_too_long(limits, "prompt", asked.prompt_characters)
        texts = max(asked.n, sampling.best_of)
        check_proposing(self._spec, asked)
        if texts > limits.best_of_limit:
            field = "n" if asked.n > sampling.best_of else "best_of"
            raise InvalidField(f"{field} is at most {limits.best_of_limit} here", field=field, got=str(texts))
        if asked.n > sampling.best_of > 1:
            raise InvalidField("n is at most best_of", field="n", got=str(asked.n))
        most = limits.max_tokens_limit
        if most is not None and sampling.max_tokens is not None and sampling.max_tokens > most:
            message = f"max_tokens is at most {most} for this model"
            raise InvalidField(message, field="max_tokens", got=str(sampling.max_tokens))

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: Padding | None = None,
    ) -> Sequence[TokenRow]:
        """Give the tokens of each text, as :meth:`Tokenizer.tokenize` says."""
        options: dict[str, Any] = {"add_special_tokens": add_special_tokens}
        if max_length is not None:
            options["max_length"] = max_length
        async with self._handover.using() as successor:
            if successor is not None:
                return await successor.tokenize(texts, padding=padding, **options)
            if padding is not None:
                options["padding"] = padding.value
            return await self._link.tokenize(await self._process.ready(), texts, **options)
