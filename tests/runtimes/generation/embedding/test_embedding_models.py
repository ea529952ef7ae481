"""Vectors of texts: what they are, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ContextExceeded, InvalidField, Overloaded
from tests.runtimes.generation.embedding.conftest import Load, problems_of
from tests.support.model_hosts import on_model_loop
from tests.support.tiny_encoders import LONGEST, VOCABULARY, TinyEncoder, word_pieces

TEXTS = ("the cat sat.", "red house", "A dog ran, the cats sat!", "xyz", "the blue dogs running")


def ids_of(text: str) -> list[int]:
    """Split a text as Python does."""
    encoded = word_pieces().encode([text], 100)["input_ids"][0]
    return [int(number) for number in encoded]


def pooled(ids: Sequence[int], pooling: str, *, normalize: bool = True) -> Any:
    """Give what a text's vector must be."""
    hidden = TinyEncoder().hidden(ids)
    vector = {"CLS": hidden[0], "LAST": hidden[-1], "MEAN": hidden.mean(0)}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["CLS", "LAST", "MEAN"])
async def test_vectors_are_those_that_numpy_finds_whatever_is_padded_beside_them(
    load: Load, embedder_folder: Path, pooling: str, normalize: bool
) -> None:
    """Texts of different lengths share an inference, whose padding is not in any vector."""
    async with load(embedder_folder, pooling=pooling, normalize=normalize) as service:
        made = await service.embed(TEXTS)

    expected = [pooled(ids_of(text), pooling, normalize=normalize) for text in TEXTS]
    assert made.vectors.dtype == np.float32
    assert np.allclose(made.vectors, expected, atol=1e-5)
    assert made.tokens == sum(len(ids_of(text)) for text in TEXTS)


async def test_a_model_without_types_of_tokens_is_served_as_well(
    load: Load, embedder_folder: Path, tmp_path: Path
) -> None:
    """It has two inputs."""
    import openvino as ov

    folder = tmp_path / "two"
    shutil.copytree(embedder_folder, folder)
    ov.save_model(TinyEncoder().model(has_types=False), folder / "openvino_model.xml", compress_to_fp16=False)

    async with load(folder) as service:
        made = await service.embed(["the cat"])

    assert np.allclose(made.vectors, [pooled(ids_of("the cat"), "CLS")], atol=1e-5)


@on_model_loop
async def test_tokens_are_taken_as_they_are_beside_texts(embedder: Any) -> None:
    """Nothing is put around them."""
    made = await embedder.embed(["the cat", (5, 6, 7)])

    assert np.allclose(made.vectors, [pooled(ids_of("the cat"), "CLS"), pooled([5, 6, 7], "CLS")], atol=1e-5)
    assert made.tokens == 4 + 3


@on_model_loop
async def test_many_texts_come_back_in_their_order(embedder: Any) -> None:
    """They are sorted by length, and run in many batches."""
    texts = [" ".join(["the"] * (1 + 7 * number % 17)) + f" {number % 10}" for number in range(500)]

    made = await embedder.embed(texts)

    assert np.allclose(made.vectors, [pooled(ids_of(text), "CLS") for text in texts], atol=1e-5)


@on_model_loop
async def test_clients_share_batches(embedder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while a batch runs is joined, and each gets its own; tokens come all at once, as nothing waits."""
    made: dict[int, Any] = {}
    sizes: list[int] = []

    async def ask(number: int) -> None:
        made[number] = (await embedder.embed([tuple(ids_of(f"{number} cats"))])).vectors[0]

    monkeypatch.setattr(embedder._rows._batcher, "_hooks", Noting(sizes))
    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(ask, number)

    for number, vector in made.items():
        assert np.allclose(vector, pooled(ids_of(f"{number} cats"), "CLS"), atol=1e-5)
    assert len(sizes) < 20


class Noting:
    """Notes the sizes of batches."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def batch_size(self, size: int) -> None:
        """Note one."""
        self._sizes.append(size)

    def queue_time(self, seconds: float) -> None:
        """Do nothing."""


@pytest.mark.parametrize("each", ["the " * LONGEST, (5,) * (LONGEST + 1)])
@on_model_loop
async def test_an_input_that_is_too_long_is_refused_by_its_place(embedder: Any, each: Any) -> None:
    """As long as nobody has asked to cut it off."""
    count = LONGEST + 2 if isinstance(each, str) else LONGEST + 1
    with pytest.raises(ContextExceeded, match=f"^Input length {count} longer than allowed {LONGEST}$") as caught:
        await embedder.embed(["fits", each])

    assert caught.value.field == "input[1]"


@on_model_loop
async def test_an_input_of_the_greatest_length_fits(embedder: Any) -> None:
    """To the last token for which the model has a position."""
    made = await embedder.embed([tuple(range(5, 5 + LONGEST))])

    assert np.allclose(made.vectors, [pooled(range(5, 5 + LONGEST), "CLS")], atol=1e-5)


async def test_what_is_too_long_is_cut_off_where_that_is_wished_for(load: Load, embedder_folder: Path) -> None:
    """The marks around a text stay."""
    text = "the cat " * LONGEST
    async with load(embedder_folder, truncate=True, pooling="MEAN") as service:
        made = await service.embed([text])

    cut = [*ids_of(text)[: LONGEST - 1], ids_of(text)[-1]]
    assert np.allclose(made.vectors, [pooled(cut, "MEAN")], atol=1e-5)
    assert made.tokens == LONGEST


@pytest.mark.parametrize("unknown", [-1, len(VOCABULARY), 2**40])
@on_model_loop
async def test_tokens_of_another_model_are_refused(embedder: Any, unknown: int) -> None:
    """OpenVINO would read beside its table."""
    with pytest.raises(InvalidField, match=f"token {unknown} is none of the model's, which are 0 to"):
        await embedder.embed([(5, unknown)])


@pytest.mark.parametrize("inputs", [[], ["a"] * 501, [()]])
@on_model_loop
async def test_no_inputs_too_many_and_empty_ones_are_refused(embedder: Any, inputs: Any) -> None:
    """As OVMS does."""
    with pytest.raises(InvalidField) as caught:
        await embedder.embed(inputs)

    assert caught.value.field == "input"


async def test_requests_beyond_the_queue_are_refused(load: Load, embedder_folder: Path) -> None:
    """Those before them are answered."""
    outcomes: list[str] = []

    async def ask() -> None:
        try:
            await service.embed([(5, 6)])
            outcomes.append("answered")
        except Overloaded:
            outcomes.append("refused")

    async with load(embedder_folder, max_queue=1) as service, trio.open_nursery() as nursery:
        side_by_side = service._rows._network.side_by_side
        for _ in range(side_by_side + 5):
            nursery.start_soon(ask)

    assert sorted(outcomes) == ["answered"] * (side_by_side + 1) + ["refused"] * 4


@on_model_loop
async def test_a_caller_that_leaves_takes_its_texts_along(embedder: Any) -> None:
    """And the next one is answered."""
    with trio.move_on_after(0):
        await embedder.embed([(5, 6)] * 500)
    made = await embedder.embed(["the cat"])
    assert embedder._rows._requests == 0
    assert embedder._rows._batcher.waiting == 0

    assert np.allclose(made.vectors, [pooled(ids_of("the cat"), "CLS")], atol=1e-5)


async def test_a_folder_without_a_tokenizer_is_refused_with_what_writes_one(load: Load, tmp_path: Path) -> None:
    """And with everything else that is missing."""
    (tmp_path / "config.json").write_text("[1]")

    problems = await problems_of(load(tmp_path))

    told = [str(problem) for problem in problems]
    assert len(told) == 3
    assert "openvino_model.xml is missing" in told[0]
    assert "openvino_tokenizer.xml is missing" in told[1]
    assert "config.json" in told[2]


async def test_a_model_that_takes_no_texts_is_refused(load: Load, embedder_folder: Path, tmp_path: Path) -> None:
    """With what it takes."""
    import openvino as ov
    import openvino.opset13 as op

    folder = tmp_path / "images"
    shutil.copytree(embedder_folder, folder)
    pixels = op.parameter(ov.PartialShape([-1, 3]), np.float32, name="pixels")
    pixels.output(0).set_names({"pixels"})
    ov.save_model(ov.Model([op.result(op.relu(pixels))], [pixels], "images"), folder / "openvino_model.xml")

    problems = await problems_of(load(folder))

    (problem,) = problems
    assert (problem.message, problem.found) == ("the model takes no texts", "pixels")


@pytest.mark.parametrize(
    ("config", "tokenizer", "longest"),
    [
        ({"max_position_embeddings": 16}, {"model_max_length": 12}, 12),
        ({"max_position_embeddings": 16}, {"model_max_length": 10**30}, 16),
        ({"max_position_embeddings": 16, "model_type": "xlm-roberta"}, {}, 14),
        ({}, {"model_max_length": 18}, 18),
    ],
)
async def test_the_greatest_length_is_the_least_that_the_files_tell(
    load: Load, embedder_folder: Path, tmp_path: Path, config: Any, tokenizer: Any, longest: int
) -> None:
    """Whatever else other servers take for it."""
    folder = tmp_path / "limited"
    shutil.copytree(embedder_folder, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    async with load(folder) as service:
        assert (await service.embed([(5,) * longest])).tokens == longest
        with pytest.raises(ContextExceeded):
            await service.embed([(5,) * (longest + 1)])
