"""Texts as tokens, without the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Padding
from ovmstrio.openvino.network import Network
from tests.service.runtimes.generation.embedding.conftest import Load
from tests.service.runtimes.generation.embedding.test_embedding_models import TEXTS, ids_of


async def tokenized(service: Any, texts: Sequence[str], **options: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each text as numbers that can be compared."""
    return [tuple(row.tolist()) for row in await service.tokenize(texts, **options)]


async def test_tokens_are_those_that_python_finds(load: Load, embedder_folder: Path) -> None:
    """Accents, capitals and unknown letters among them."""
    texts = [*TEXTS, "Thé CÄT", "ran 2 houses", "λ the", "the[SEP]cat"]
    async with load(embedder_folder) as service:
        made = await tokenized(service, texts)

    assert [list(row) for row in made[:-2]] == [ids_of(text) for text in texts[:-2]]
    assert made[-2] == (2, 1, ids_of("the")[1], 3)
    assert made[-1] == (2, ids_of("the")[1], 3, ids_of("cat")[1], 3)


async def test_empty_texts_have_the_marks_alone(load: Load, embedder_folder: Path) -> None:
    """Wherever they are among others."""
    async with load(embedder_folder) as service:
        assert await tokenized(service, ["", "the", ""]) == [(2, 3), tuple(ids_of("the")), (2, 3)]
        assert await tokenized(service, [""], add_special_tokens=False) == [()]
        assert await tokenized(service, []) == []
        assert await tokenized(service, ["  ", "\t"]) == [(2, 3), (2, 3)]


async def test_texts_are_cut_off_and_filled_up_as_asked_for(load: Load, embedder_folder: Path) -> None:
    """The marks stay."""
    the, cat = ids_of("the cat")[1:3]
    async with load(embedder_folder) as service:
        cut = await tokenized(service, ["the cat the", "cat"], max_length=4)
        right = await tokenized(service, ["the", "the cat"], max_length=5, padding=Padding.RIGHT)
        left = await tokenized(service, ["the", "the cat"], padding=Padding.LEFT, add_special_tokens=False)

    assert cut == [(2, the, cat, 3), (2, cat, 3)]
    assert right == [(2, the, 3, 0, 0), (2, the, cat, 3, 0)]
    assert left == [(0, the), (the, cat)]


async def test_a_length_without_room_for_the_marks_is_refused(load: Load, embedder_folder: Path) -> None:
    """With what there must be."""
    async with load(embedder_folder) as service:
        with pytest.raises(InvalidField, match="max_length must be 2 or more, for the tokens around a text; got 1"):
            await service.tokenize(["the"], max_length=1)


async def test_long_and_odd_texts_are_tokenized_in_parts(load: Load, embedder_folder: Path) -> None:
    """NULs, halves of letters, and a megabyte."""
    async with load(embedder_folder) as service:
        long, *odd = await tokenized(service, ["the cat " * 100_000, "the\0cat", "the \ud800", "the"])

    assert len(long) == 200_002
    assert odd[-1] == tuple(ids_of("the"))
    assert odd[1] == tuple(ids_of("the ?"))


async def test_no_text_is_tokenized_on_the_event_loop(
    load: Load, embedder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may have any length, so the time of the first texts decides nothing."""
    places: list[bool] = []
    infer = Network.infer

    async def noted(self: Network, *arguments: Any) -> Any:
        places.append(self.runs_inline)
        return await infer(self, *arguments)

    async with load(embedder_folder) as service:
        monkeypatch.setattr(Network, "infer", noted)
        for _ in range(300):
            await service.tokenize(["the"])
    assert places == [False] * 300
