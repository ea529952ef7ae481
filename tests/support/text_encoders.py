"""A service that makes vectors, scores and tokens of texts by rules that tests can follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.generation import Embeddings, Padding, Task, TokenIds
from ovmstrio.core.request import ServableMetadata
from tests.support.pass_through import load_pass_through
from tests.support.text_generators import ScriptedGenerator

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
