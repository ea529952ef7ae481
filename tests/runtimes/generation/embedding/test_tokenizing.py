"""Texts as tokens, without the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Padding
from tests.runtimes.generation.embedding.test_embedding_models import TEXTS, ids_of
from tests.support.model_hosts import on_model_loop


async def tokenized(service: Any, texts: Sequence[str], **options: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each text as numbers that can be compared."""
    return [tuple(row.tolist()) for row in await service.tokenize(texts, **options)]


@on_model_loop
async def test_tokens_are_those_that_python_finds(embedder: Any) -> None:
    """Accents, capitals and unknown letters among them."""
    texts = [*TEXTS, "Thé CÄT", "ran 2 houses", "λ the", "the[SEP]cat"]
    made = await tokenized(embedder, texts)

    assert [list(row) for row in made[:-2]] == [ids_of(text) for text in texts[:-2]]
    assert made[-2] == (2, 1, ids_of("the")[1], 3)
    assert made[-1] == (2, ids_of("the")[1], 3, ids_of("cat")[1], 3)


@on_model_loop
async def test_empty_texts_have_the_marks_alone(embedder: Any) -> None:
    """Wherever they are among others."""
    assert await tokenized(embedder, ["", "the", ""]) == [(2, 3), tuple(ids_of("the")), (2, 3)]
    assert await tokenized(embedder, [""], add_special_tokens=False) == [()]
    assert await tokenized(embedder, []) == []
    assert await tokenized(embedder, ["  ", "\t"]) == [(2, 3), (2, 3)]


@on_model_loop
async def test_texts_are_cut_off_and_filled_up_as_asked_for(embedder: Any) -> None:
    """The marks stay."""
    the, cat = ids_of("the cat")[1:3]
    cut = await tokenized(embedder, ["the cat the", "cat"], max_length=4)
    right = await tokenized(embedder, ["the", "the cat"], max_length=5, padding=Padding.RIGHT)
    left = await tokenized(embedder, ["the", "the cat"], padding=Padding.LEFT, add_special_tokens=False)

    assert cut == [(2, the, cat, 3), (2, cat, 3)]
    assert right == [(2, the, 3, 0, 0), (2, the, cat, 3, 0)]
    assert left == [(0, the), (the, cat)]


@on_model_loop
async def test_a_length_without_room_for_the_marks_is_refused(embedder: Any) -> None:
    """With what there must be."""
    with pytest.raises(InvalidField, match="max_length must be 2 or more, for the tokens around a text; got 1"):
        await embedder.tokenize(["the"], max_length=1)


@on_model_loop
async def test_long_and_odd_texts_are_tokenized_in_parts(embedder: Any) -> None:
    """NULs, halves of letters, and a megabyte."""
    long, *odd = await tokenized(embedder, ["the cat " * 100_000, "the\0cat", "the \ud800", "the"])

    assert len(long) == 200_002
    assert odd[-1] == tuple(ids_of("the"))
    assert odd[1] == tuple(ids_of("the ?"))


@on_model_loop
async def test_no_text_is_tokenized_on_the_event_loop(embedder: Any) -> None:
    """A text may have any length, of which the first one tells nothing."""
    network = embedder._texts.tokens._network
    assert not network.runs_inline
    for _ in range(300):
        await embedder.tokenize(["the"])
    assert not network.runs_inline
