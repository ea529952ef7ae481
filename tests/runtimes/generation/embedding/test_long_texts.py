"""Texts that are much longer than a model takes: how much of them is tokenized, and what they are refused with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovmstrio.core.errors import ContextExceeded, InvalidField
from ovmstrio.core.generation import Padding, Task
from ovmstrio.core.text_bounds import MAX_TOKENIZED_CHARACTERS, max_characters
from tests.runtimes.generation.embedding.conftest import Load
from tests.support.model_hosts import on_model_loop
from tests.support.tiny_encoders import LONGEST

KINDS = {"words": "the cat ", "wide": "\u4e2d", "dotted": ".", "one word": "a"}
FIRST_PREFIX = 4096


class Counted:
    """Counts the characters that a model's tokenizer is given."""

    def __init__(self, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        tokens = service._texts.tokens
        encode = tokens._encode_at_once

        async def counted(texts: Sequence[str]) -> Any:
            self.characters += sum(map(len, texts))
            return await encode(texts)

        monkeypatch.setattr(tokens, "_encode_at_once", counted)


def text_of(kind: str, characters: int) -> str:
    """Return a text of about so many characters."""
    return KINDS[kind] * (characters // len(KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@on_model_loop
async def test_a_text_of_too_many_characters_is_not_tokenized(
    embedder: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and as one of several."""
    text = text_of(kind, 3_000_000)
    counted = Counted(embedder, monkeypatch)
    with pytest.raises(ContextExceeded, match=rf"^Input length of at least \d+ longer than allowed {LONGEST}$"):
        await embedder.embed([text])
    with pytest.raises(ContextExceeded, match=r"^Input length of at least \d+ longer.*24 more, and the rest"):
        await embedder.embed([text] * 500)
    with pytest.raises(ContextExceeded, match="Input length 1000000 longer than allowed"):
        await embedder.embed([(5,) * 1_000_000])
    assert counted.characters == 0


@pytest.mark.parametrize("kind", ["words", "wide", "dotted"])
@on_model_loop
async def test_a_text_of_too_many_tokens_is_refused_by_its_beginning(
    embedder: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of it is not tokenized."""
    counted = Counted(embedder, monkeypatch)
    with pytest.raises(ContextExceeded, match=rf"^Input length of at least \d+ longer than allowed {LONGEST}$"):
        await embedder.embed([text_of(kind, 200_000)])
    assert counted.characters == FIRST_PREFIX


@on_model_loop
async def test_a_text_of_few_and_long_tokens_is_taken(embedder: Any) -> None:
    """Blanks are no tokens, and a word that is too long is one."""
    plain = await embedder.embed(["the cat", "[UNK]"])
    long = await embedder.embed(["the" + " " * 100_000 + "cat", "a" * 100_000])
    assert np.array_equal(plain.vectors, long.vectors)
    assert long.tokens == plain.tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts_left", [False, True])
@on_model_loop
async def test_a_text_that_is_cut_has_the_vector_of_what_is_kept(
    cutting_embedder: Any, kind: str, cuts_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From either side; no more of it is tokenized than is needed for that."""
    text = "the dog " * 50 + text_of(kind, 2_000_000) + " the blue house" * 50
    monkeypatch.setattr(cutting_embedder._texts, "_cuts_left", cuts_left)
    short = await cutting_embedder.embed([text[-800:] if cuts_left else text[:800]])
    counted = Counted(cutting_embedder, monkeypatch)
    long = await cutting_embedder.embed([text])
    assert np.array_equal(short.vectors, long.vectors)
    assert long.tokens == LONGEST
    assert counted.characters <= max_characters(LONGEST) * 7 / 3


@pytest.mark.parametrize(
    "texts", [["\x01"] * 3, ["\x01", "\x02\x01"], ["\x01" * 100_000, "the", "\x01"]], ids=["same", "other", "mixed"]
)
@on_model_loop
async def test_texts_that_the_tokenizer_leaves_nothing_of_have_the_marks_alone(embedder: Any, texts: list[str]) -> None:
    """It drops control characters."""
    rows = [row.tolist() for row in await embedder.tokenize(texts)]
    assert [row for row, text in zip(rows, texts, strict=True) if text != "the"] == [[2, 3]] * (
        len(texts) - texts.count("the")
    )


@on_model_loop
async def test_tokens_of_a_text_that_is_cut_are_those_of_its_beginning(
    embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small part of the text is tokenized."""
    text = "the cats " * 400_000
    (alone,) = await embedder.tokenize([text[:4000]], max_length=500)
    counted = Counted(embedder, monkeypatch)
    (cut,) = await embedder.tokenize([text], max_length=500)
    assert cut.tolist() == alone.tolist()
    assert counted.characters == 4096


@on_model_loop
async def test_padding_has_a_bound(embedder: Any) -> None:
    """One long text among many short ones makes all of them as long."""
    with pytest.raises(InvalidField, match=f"at most {MAX_TOKENIZED_CHARACTERS} tokens with the padding"):
        await embedder.tokenize(["the " * 1000] + ["the"] * 10_000, padding=Padding.LEFT)


@pytest.mark.parametrize(
    ("query", "documents", "message", "read"),
    [
        (300_000, 10, "the query may have 8 tokens, .*; got at least", 0),
        (100_000, 10, "the query may have 8 tokens, .*; got at least", 4096),
        (8, 200_000, "the documents have more than 50 parts of 15 tokens together", 8 + 50 * 15 * 8),
        (8, 30_000_000, "the documents have more than 50 parts of 20 tokens together", 0),
    ],
)
async def test_a_long_query_and_long_documents_are_refused_before_all_of_them_is_tokenized(
    load: Load,
    reranker_folder: Path,
    query: int,
    documents: int,
    message: str,
    read: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is the one that they have always had."""
    async with load(reranker_folder, Task.RERANK, max_allowed_chunks=50) as service:
        counted = Counted(service, monkeypatch)
        with pytest.raises(InvalidField, match=message):
            await service.rerank("the cat " * (query // 8), ["the cat " * (documents // 8)])
    assert counted.characters == read


async def test_no_document_is_read_behind_those_with_too_many_parts(
    load: Load, reranker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of 500 KB are tokenized one after the other."""
    async with load(reranker_folder, Task.RERANK, max_allowed_chunks=10_000) as service:
        counted = Counted(service, monkeypatch)
        with pytest.raises(InvalidField, match="the documents have more than 10000 parts of 15 tokens together"):
            await service.rerank("the cat", ["the cat " * 60_000] * 25)
    assert counted.characters < 500_000 * 3
