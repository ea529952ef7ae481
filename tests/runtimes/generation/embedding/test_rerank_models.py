"""How well documents answer a query."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Task
from tests.runtimes.generation.embedding.conftest import Load, problems_of
from tests.runtimes.generation.embedding.test_embedding_models import ids_of
from tests.support.model_hosts import on_model_loop
from tests.support.tiny_encoders import LONGEST, TinyEncoder

QUERY = "red cat"
DOCUMENTS = ("the cat sat.", "red house", "", "a blue dog ran!")


def pair(query: str, document: list[int]) -> tuple[list[int], list[int]]:
    """Put a query and a document together."""
    asked = ids_of(query)[1:-1]
    return [2, *asked, 3, *document, 3], [0] * (len(asked) + 2) + [1] * (len(document) + 1)


@on_model_loop
async def test_scores_are_those_that_numpy_finds(reranker: Any) -> None:
    """Each document is read together with the query, an empty one as well."""
    scores, tokens = await reranker.rerank(QUERY, DOCUMENTS)

    pairs = [pair(QUERY, ids_of(document)[1:-1]) for document in DOCUMENTS]
    assert scores == pytest.approx([TinyEncoder().score(*each) for each in pairs], abs=1e-5)
    assert tokens == sum(len(ids) for ids, _ in pairs)


@on_model_loop
async def test_a_long_document_scores_as_its_best_part(reranker: Any) -> None:
    """Parts have all the room that the query leaves."""
    document = "the cat sat . red house a blue dog ran ! the cat sat . red house ? " * 2
    room = LONGEST - len(ids_of(QUERY)[1:-1]) - 3
    ids = ids_of(document)[1:-1]
    assert len(ids) == 36
    parts = [ids[start : start + room] for start in range(0, len(ids), room)]
    assert len(parts) > 2

    scores, tokens = await reranker.rerank(QUERY, ["the", document])

    expected = [TinyEncoder().score(*pair(QUERY, part)) for part in parts]
    assert scores[1] == pytest.approx(max(expected), abs=1e-5)
    assert scores[0] == pytest.approx(TinyEncoder().score(*pair(QUERY, ids_of("the")[1:-1])), abs=1e-5)
    assert tokens == sum(len(pair(QUERY, part)[0]) for part in [*parts, [5]])


@on_model_loop
async def test_a_query_that_leaves_no_room_is_refused(reranker: Any) -> None:
    """With how long it may be."""
    with pytest.raises(InvalidField, match="the query may have 8 tokens, half of what the model reads at once; got 9"):
        await reranker.rerank("the " * 9, ["cat"])


@pytest.mark.parametrize("documents", [[], ["the"] * 501])
@on_model_loop
async def test_no_documents_and_too_many_are_refused(reranker: Any, documents: list[str]) -> None:
    """The most there may be is said."""
    with pytest.raises(InvalidField, match=f"documents must be 1 to 500; got {len(documents)}"):
        await reranker.rerank(QUERY, documents)


@on_model_loop
async def test_documents_of_too_many_parts_are_refused(reranker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of them is read by the model."""
    monkeypatch.setattr(reranker, "_most_chunks", 3)
    with pytest.raises(InvalidField, match="the documents have more than 3 parts of 15 tokens together"):
        await reranker.rerank(QUERY, ["the " * 20, "cat", "dog"])


async def test_a_model_that_gives_vectors_is_no_reranker(load: Load, embedder_folder: Path) -> None:
    """What it gives is said."""
    problems = await problems_of(load(embedder_folder, Task.RERANK))

    (problem,) = problems
    assert problem.expected == "an output logits [?,1] or [?,2]"
    assert "last_hidden_state" in problem.found


async def test_two_logits_are_no_and_yes(load: Load, reranker_folder: Path, tmp_path: Path) -> None:
    """The share of the second one is the score."""
    import numpy as np
    import openvino as ov
    import openvino.opset13 as op

    model = TinyEncoder().model(scores=True)
    logit = model.output(0).get_node().input_value(0)
    two = op.concat([op.constant(np.zeros((1, 1), np.float32)), op.constant(np.zeros((1, 1), np.float32))], 1)
    both = op.add(op.multiply(logit, op.constant(np.array([[0, 1]], np.float32))), two)
    both.output(0).set_names({"logits"})
    folder = tmp_path / "two"
    shutil.copytree(reranker_folder, folder)
    logit.set_names({"raw"})
    ov.save_model(
        ov.Model([op.result(both)], model.get_parameters(), "two"),
        folder / "openvino_model.xml",
        compress_to_fp16=False,
    )

    async with load(folder, Task.RERANK) as service:
        scores, _ = await service.rerank(QUERY, ["the cat"])

    assert scores == pytest.approx([TinyEncoder().score(*pair(QUERY, ids_of("the cat")[1:-1]))], abs=1e-5)
