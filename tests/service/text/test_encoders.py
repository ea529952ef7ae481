from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest
import trio

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core.errors import ConfigError, ContextExceeded, InvalidField, Overloaded, Problem, QueueTimeExceeded
from ovmstrio.core.generation import Padding, Task
from ovmstrio.core.hooks import NULL_METERS, Meters
from ovmstrio.core.service import Detection
from ovmstrio.inference.network import Network
from ovmstrio.serving.kind import LoadContext, ignore_detection, lease_nothing
from ovmstrio.text.kind import load_task
from ovmstrio.util.truncation import MAX_TOKENIZED_CHARACTERS, max_characters
from tests.support.servables import RecordingHooks
from tests.support.tiny_encoders import LONGEST, VOCABULARY, TinyEncoder, word_pieces, write_embedder, write_reranker

TEXTS = ("the cat sat.", "red house", "A dog ran, the cats sat!", "xyz", "the blue dogs running")


Load = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="module")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory: pytest.TempPathFactory, embedder_folder: Path) -> Path:
    return write_reranker(tmp_path_factory.mktemp("reranker"), embedder_folder)


@pytest.fixture
def load() -> Load:
    return _load


@asynccontextmanager
async def _load(
    folder: Path,
    task: Task = Task.EMBEDDINGS,
    meters: Meters = NULL_METERS,
    detect: Callable[[Detection], None] = ignore_detection,
    **settings: Any,
) -> AsyncIterator[Any]:
    spec = TextModelSpec(name="tiny", base_path=folder, path=folder, task=task, **settings)
    failure = None
    async with trio.open_nursery() as tasks:
        try:
            service: Any = await load_task(spec, LoadContext(lease_nothing, tasks, meters, detect=detect))
        except ConfigError as error:
            failure = error
        else:
            try:
                yield service
            finally:
                with trio.CancelScope(shield=True):
                    await service.aclose()
    if failure is not None:
        raise failure


@pytest.fixture
async def embedder(embedder_folder: Path) -> AsyncIterator[Any]:
    async with _load(embedder_folder) as service:
        yield service


@pytest.fixture
async def reranker(reranker_folder: Path) -> AsyncIterator[Any]:
    async with _load(reranker_folder, Task.RERANK) as service:
        yield service


async def problems_of(folder: Path, task: Task = Task.EMBEDDINGS) -> list[Problem]:
    spec = TextModelSpec(name="tiny", base_path=folder, path=folder, task=task)
    async with trio.open_nursery() as tasks:
        with pytest.raises(ConfigError) as caught:
            await load_task(spec, LoadContext(lease_nothing, tasks))
    return list(caught.value.problems)


@pytest.fixture
def copied_folder(embedder_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(embedder_folder, tmp_path / "copy")


def ids_of(text: str) -> list[int]:
    return [int(number) for number in word_pieces().encode([text], 100)["input_ids"][0]]


def pooled(text: str | Sequence[int], pooling: str = "CLS", *, normalize: bool = True) -> Any:
    hidden = TinyEncoder().hidden(ids_of(text) if isinstance(text, str) else text)
    vector = {"CLS": hidden[0], "LAST": hidden[-1], "MEAN": hidden.mean(0)}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["CLS", "LAST", "MEAN"])
async def test_vectors_of_padded_texts_are_those_of_numpy(
    load: Load, embedder_folder: Path, pooling: str, normalize: bool
) -> None:
    many = [" ".join(["the"] * (1 + 7 * number % 17)) + f" {number % 10}" for number in range(300)]
    texts = [*TEXTS, *many]
    async with load(embedder_folder, pooling=pooling, normalize=normalize) as service:
        made = await service.embed(texts)
    assert made.vectors.dtype == np.float32
    assert np.allclose(made.vectors, [pooled(text, pooling, normalize=normalize) for text in texts], atol=1e-5)
    assert made.tokens == sum(len(ids_of(text)) for text in texts)


async def test_model_without_token_types_is_served(load: Load, copied_folder: Path) -> None:
    file = copied_folder / "openvino_model.xml"
    ov.save_model(TinyEncoder().model(has_types=False), file, compress_to_fp16=False)
    async with load(copied_folder) as service:
        made = await service.embed(["the cat"])
    assert np.allclose(made.vectors, [pooled("the cat")], atol=1e-5)


async def test_tokens_of_the_caller_are_embedded_unchanged(embedder: Any) -> None:
    longest = tuple(range(5, 5 + LONGEST))
    made = await embedder.embed(["the cat", (5, 6, 7), longest])
    assert np.allclose(made.vectors, [pooled("the cat"), pooled([5, 6, 7]), pooled(longest)], atol=1e-5)
    assert made.tokens == 4 + 3 + LONGEST


async def test_inputs_are_truncated_on_request(embedder: Any, reranker: Any) -> None:
    texts = ["the cat sat on the mat", "the"]
    made = await embedder.embed(texts, max_tokens=4)
    cut_rows = [[*ids_of(text)[:-1][:3], 3] for text in texts]
    assert np.allclose(made.vectors, [pooled(row) for row in cut_rows], atol=1e-5)
    assert made.tokens == sum(map(len, cut_rows))
    whole = await embedder.embed(["the " * 2 * LONGEST], max_tokens=-1)
    assert whole.tokens == LONGEST
    query, document = "the cat", "cat the cat the"
    scores, tokens = await reranker.rerank(query, [document, "the"], max_tokens=7)
    expected, _ = await reranker.rerank(query, ["cat the", "the"])
    assert scores == pytest.approx(expected)
    assert tokens == 7 + 6
    with pytest.raises(InvalidField, match="truncate_prompt_tokens"):
        await reranker.rerank(query, [document], max_tokens=5)


@pytest.mark.parametrize(
    ("config", "pooling_config", "expected"),
    [
        ({}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": True}, "MEAN"),
        ({}, {"pooling_mode_lasttoken": True}, "LAST"),
        ({}, {"pooling_mode_cls_token": True}, "CLS"),
        ({}, {"pooling_mode": "mean"}, "MEAN"),
        ({"architectures": ["Qwen3ForCausalLM"]}, None, "LAST"),
        ({"architectures": ["Qwen3Model"]}, {"pooling_mode_mean_tokens": True}, "MEAN"),
        ({"architectures": ["BertModel"]}, None, "CLS"),
        ({}, None, "CLS"),
    ],
)
async def test_pooling_is_that_of_the_files(
    load: Load, copied_folder: Path, config: Any, pooling_config: Any, expected: str
) -> None:
    (copied_folder / "config.json").write_text(json.dumps(config))
    if pooling_config is not None:
        (copied_folder / "1_Pooling").mkdir()
        (copied_folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    async with load(copied_folder) as service:
        made = await service.embed(["the cat sat"])
    async with load(copied_folder, pooling="MEAN") as service:
        overridden = await service.embed(["the cat sat"])
    assert np.allclose(made.vectors, [pooled("the cat sat", expected)], atol=1e-5)
    assert np.allclose(overridden.vectors, [pooled("the cat sat", "MEAN")], atol=1e-5)


@pytest.mark.parametrize(
    ("pooling_config", "found"),
    [
        ({"pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "CLS and MEAN"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
async def test_unsupported_pooling_of_the_files_is_refused(
    load: Load, copied_folder: Path, pooling_config: Any, found: str
) -> None:
    (copied_folder / "1_Pooling").mkdir()
    (copied_folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    (problem,) = await problems_of(copied_folder)
    assert (problem.path, problem.found, problem.expected) == ("pooling", found, "CLS or LAST or MEAN")
    async with load(copied_folder, pooling="CLS") as service:
        assert len((await service.embed(["the cat"])).vectors) == 1


def _write_sentence_files(folder: Path, modules: Sequence[str], **files: Any) -> None:
    listed = [
        {"idx": number, "path": f"{number}_{name}" if number else "", "type": f"sentence_transformers.models.{name}"}
        for number, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))


async def test_files_of_sentence_transformers_are_applied(load: Load, copied_folder: Path) -> None:
    _write_sentence_files(
        copied_folder,
        ["Transformer", "Pooling"],
        **{"1_Pooling__config": {"pooling_mode_mean_tokens": True}, "sentence_bert_config": {"max_seq_length": 9}},
        config_sentence_transformers={"prompts": {"query": "the red ", "document": ""}, "default_prompt_name": "query"},
    )
    detected: list[Detection] = []
    async with load(copied_folder, detect=detected.append) as service:
        made = await service.embed(["cat", (5, 6)])
        plain = await service.embed(["cat"], prompt_name="document")
        assert service.limits.context_length == 9
        with pytest.raises(ContextExceeded, match="allowed 9"):
            await service.embed([(5,) * 10])
        with pytest.raises(InvalidField, match="prompt_name: expected query, document"):
            await service.embed(["cat"], prompt_name="passage")
    expected = [pooled(text, "MEAN", normalize=False) for text in ("the red cat", [5, 6])]
    assert np.allclose(made.vectors, expected, atol=1e-5)
    assert np.allclose(plain.vectors, [pooled("cat", "MEAN", normalize=False)], atol=1e-5)
    assert [(each.setting, each.value, each.source) for each in detected] == [
        ("task", "embeddings", "modules.json"),
        ("max_model_len", 9, "sentence_bert_config.json"),
        ("pooling", "MEAN", "1_Pooling/config.json"),
        ("normalize", False, "modules.json"),
        ("default_prompt_name", "query", "config_sentence_transformers.json"),
    ]


async def test_options_win_over_files_of_sentence_transformers(load: Load, copied_folder: Path) -> None:
    _write_sentence_files(
        copied_folder,
        ["Transformer", "Dense"],
        sentence_bert_config={"max_seq_length": 9},
        config_sentence_transformers={"prompts": {"query": "the red "}, "default_prompt_name": "query"},
    )
    chosen = {"pooling": "LAST", "normalize": True, "default_prompt_name": "", "max_model_len": 12}
    detected: list[Detection] = []
    async with load(copied_folder, detect=detected.append, **chosen) as service:
        made = await service.embed(["cat", (5,) * 12])
    assert np.allclose(made.vectors, [pooled("cat", "LAST"), pooled([5] * 12, "LAST")], atol=1e-5)
    assert {each.setting: (each.value, each.source) for each in detected} == {
        "task": ("embeddings", "modules.json"),
        **{name: (value, "option") for name, value in chosen.items()},
    }


async def test_modules_that_would_be_missing_are_refused(copied_folder: Path) -> None:
    _write_sentence_files(copied_folder, ["Transformer", "Pooling", "Dense", "Normalize"])
    (problem,) = await problems_of(copied_folder)
    assert problem.message == "modules of the model are not supported: Dense"
    assert problem.file.endswith("modules.json")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_model_len": LONGEST + 1}, f"at most {LONGEST}, the positions of the model"),
        ({"default_prompt_name": "query"}, "no name, as the model has no prompts"),
    ],
)
async def test_options_that_contradict_the_model_are_refused(
    load: Load, embedder_folder: Path, settings: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        async with load(embedder_folder, **settings):
            pass
    (problem,) = caught.value.problems
    assert (problem.path, problem.expected) == (*settings, expected)


@pytest.mark.parametrize("count", [501, 2048])
async def test_hundreds_of_inputs_have_the_vectors_of_each_alone(embedder: Any, count: int) -> None:
    inputs = [
        f"the {'cat ' * (number % 7)}{number}" if number % 3 else (5, 6, 7 + number % 9) for number in range(count)
    ]
    made = await embedder.embed(inputs)
    expected = [pooled(each if isinstance(each, str) else list(each)) for each in inputs]
    assert np.allclose(made.vectors, expected, atol=1e-5)


async def test_number_of_inputs_is_limited_by_the_settings(
    load: Load, embedder_folder: Path, reranker_folder: Path
) -> None:
    async with load(embedder_folder, max_inputs=3) as service:
        assert len((await service.embed(["the"] * 3)).vectors) == 3
        with pytest.raises(InvalidField, match="input: expected 1 to 3 items"):
            await service.embed(["the"] * 4)
    async with load(reranker_folder, Task.RERANK, max_inputs=2) as service:
        assert len((await service.rerank("cat", ["the"] * 2))[0]) == 2
        with pytest.raises(InvalidField, match="documents: expected 1 to 2 items"):
            await service.rerank("cat", ["the"] * 3)


async def test_concurrent_requests_share_batches(load: Load, embedder_folder: Path) -> None:
    made: dict[int, Any] = {}
    hooks = RecordingHooks()
    meters: Any = SimpleNamespace(servable=lambda *_: hooks)

    async def embed(number: int) -> None:
        made[number] = (await service.embed([tuple(ids_of(f"{number} cats"))])).vectors[0]

    async with load(embedder_folder, meters=meters) as service, trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(embed, number)
    for number, vector in made.items():
        assert np.allclose(vector, pooled(f"{number} cats"), atol=1e-5)
    assert 0 < len(hooks.batch_sizes) < 20


@pytest.mark.parametrize(
    ("text", "count"), [("the " * LONGEST, LONGEST + 2), ((5,) * (LONGEST + 1), LONGEST + 1)], ids=["text", "tokens"]
)
async def test_too_long_input_is_refused_by_its_place(embedder: Any, text: Any, count: int) -> None:
    with pytest.raises(ContextExceeded, match=f"^Input length {count} longer than allowed {LONGEST}$") as caught:
        await embedder.embed(["fits", text])
    assert caught.value.field == "input[1]"


async def test_too_long_input_is_truncated_if_configured(load: Load, embedder_folder: Path) -> None:
    text = "the cat " * LONGEST
    async with load(embedder_folder, truncate=True, pooling="MEAN") as service:
        made = await service.embed([text])
    ids = ids_of(text)
    assert np.allclose(made.vectors, [pooled([*ids[: LONGEST - 1], ids[-1]], "MEAN")], atol=1e-5)
    assert made.tokens == LONGEST


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        # OpenVINO would read outside of its table for unknown tokens.
        *(([(5, number)], f"token {number} is none of the model's") for number in (-1, len(VOCABULARY), 2**40)),
        ([], "input: expected 1 to 2048 items .max_inputs.; got 0"),
        (["a"] * 2049, "input: expected 1 to 2048 items .max_inputs.; got 2049"),
        ([()], "input has no tokens"),
    ],
)
async def test_invalid_inputs_are_refused(embedder: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InvalidField, match=message) as caught:
        await embedder.embed(inputs)
    assert caught.value.field == "input"


async def test_requests_that_cannot_start_within_the_queue_time_are_refused(load: Load, embedder_folder: Path) -> None:
    outcomes: Counter[str] = Counter()

    async def embed(rows: int) -> None:
        try:
            await service.embed([(5, 6)] * rows)
            outcomes["answered"] += 1
        except QueueTimeExceeded:
            outcomes["refused"] += 1

    async with load(embedder_folder, max_queue_time=0, plugin_config={"NUM_STREAMS": 1}) as service:
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(embed, 500)
        assert outcomes["answered"] + outcomes["refused"] == 30
        assert outcomes["refused"] > 0
        assert outcomes["answered"] > 0
        await service.embed(["the cat"])


async def test_requests_beyond_the_queue_are_refused(load: Load, embedder_folder: Path) -> None:
    outcomes: list[str] = []

    async def embed() -> None:
        try:
            await service.embed([(5, 6)])
            outcomes.append("answered")
        except Overloaded:
            outcomes.append("refused")

    one_stream = {"NUM_STREAMS": 1}
    async with load(embedder_folder, max_queue=1, plugin_config=one_stream) as service:
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(embed)
        for _ in range(50):
            with trio.move_on_after(0):
                await service.embed([(5, 6)] * 500)
        made = await service.embed(["the cat"])
    assert sorted(outcomes) == ["answered"] * 2 + ["refused"] * 4
    assert np.allclose(made.vectors, [pooled("the cat")], atol=1e-5)


async def test_all_missing_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    texts = [str(problem) for problem in await problems_of(tmp_path)]
    for text, part in zip(
        texts, ("openvino_model.xml is missing", "openvino_tokenizer.xml is missing", "config.json"), strict=True
    ):
        assert part in text


async def test_model_without_inputs_of_texts_is_refused(copied_folder: Path) -> None:
    pixels = op.parameter(ov.PartialShape([-1, 3]), np.float32, name="pixels")
    pixels.output(0).set_names({"pixels"})
    ov.save_model(ov.Model([op.result(op.relu(pixels))], [pixels], "images"), copied_folder / "openvino_model.xml")
    (problem,) = await problems_of(copied_folder)
    assert (problem.message, problem.found) == ("not a text model", "pixels")


@pytest.mark.parametrize(
    ("config", "tokenizer", "longest"),
    [
        ({"max_position_embeddings": 16}, {"model_max_length": 12}, 12),
        ({"max_position_embeddings": 16}, {"model_max_length": 10**30}, 16),
        ({"max_position_embeddings": 16, "model_type": "xlm-roberta"}, {}, 14),
        ({}, {"model_max_length": 18}, 18),
    ],
)
async def test_context_length_is_the_least_of_the_files(
    load: Load, copied_folder: Path, config: Any, tokenizer: Any, longest: int
) -> None:
    (copied_folder / "config.json").write_text(json.dumps(config))
    (copied_folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    async with load(copied_folder) as service:
        assert service.limits.context_length == longest
        assert (await service.embed([(5,) * longest])).tokens == longest
        with pytest.raises(ContextExceeded):
            await service.embed([(5,) * (longest + 1)])


KINDS = {"words": "the cat ", "wide": "\u4e2d", "dotted": ".", "one word": "a"}
FIRST_PREFIX = 4096


class _CountedCharacters:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        infer = Network.infer

        async def counted(network: Network, arrays: Sequence[Any], *arguments: Any) -> Any:
            # Of all models only a tokenizer takes bytes.
            self.characters += sum(len(each.tobytes().decode()) for each in arrays if each.dtype == np.uint8)
            return await infer(network, arrays, *arguments)

        monkeypatch.setattr(Network, "infer", counted)


def text_of(kind: str, characters: int) -> str:
    return KINDS[kind] * (characters // len(KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
async def test_text_of_too_many_characters_is_refused_untokenized(
    embedder: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(kind, 3_000_000)
    counted = _CountedCharacters(monkeypatch)
    for inputs, message in (
        ([text], rf"^Input length of at least \d+ longer than allowed {LONGEST}$"),
        ([text] * 500, r"^Input length of at least \d+ longer.*24 more, and the rest"),
        ([(5,) * 1_000_000], "Input length 1000000 longer than allowed"),
    ):
        with pytest.raises(ContextExceeded, match=message):
            await embedder.embed(inputs)
    assert counted.characters == 0


@pytest.mark.parametrize("kind", ["words", "wide", "dotted"])
async def test_text_of_too_many_tokens_is_refused_by_its_beginning(
    embedder: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _CountedCharacters(monkeypatch)
    with pytest.raises(ContextExceeded, match=rf"^Input length of at least \d+ longer than allowed {LONGEST}$"):
        await embedder.embed([text_of(kind, 200_000)])
    assert counted.characters == FIRST_PREFIX


async def test_long_text_of_few_tokens_is_embedded(embedder: Any) -> None:
    # Blanks are no tokens, and a word that is too long is one.
    plain = await embedder.embed(["the cat", "[UNK]"])
    long = await embedder.embed(["the" + " " * 100_000 + "cat", "a" * 100_000])
    assert np.array_equal(plain.vectors, long.vectors)
    assert long.tokens == plain.tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
async def test_truncated_text_has_the_vector_of_its_kept_side(
    load: Load, copied_folder: Path, kind: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the dog " * 50 + text_of(kind, 2_000_000) + " the blue house" * 50
    (copied_folder / "tokenizer_config.json").write_text(json.dumps({"truncation_side": side}))
    async with load(copied_folder, truncate=True) as service:
        short = await service.embed([text[-800:] if side == "left" else text[:800]])
        counted = _CountedCharacters(monkeypatch)
        long = await service.embed([text])
    assert np.array_equal(short.vectors, long.vectors)
    assert long.tokens == LONGEST
    assert counted.characters <= max_characters(LONGEST) * 7 / 3


@pytest.mark.parametrize(
    "texts", [["\x01"] * 3, ["\x01", "\x02\x01"], ["\x01" * 100_000, "the", "\x01"]], ids=["same", "other", "mixed"]
)
async def test_texts_of_control_characters_have_only_special_tokens(embedder: Any, texts: list[str]) -> None:
    rows = [row.tolist() for row in await embedder.tokenize(texts)]
    assert rows == [ids_of("the") if text == "the" else [2, 3] for text in texts]


async def test_tokens_of_a_truncated_text_need_only_its_beginning(
    embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the cats " * 400_000
    (alone,) = await embedder.tokenize([text[:4000]], max_length=500)
    counted = _CountedCharacters(monkeypatch)
    (cut,) = await embedder.tokenize([text], max_length=500)
    assert cut.tolist() == alone.tolist()
    assert counted.characters == 4096


async def test_number_of_padded_tokens_is_bounded(embedder: Any) -> None:
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
async def test_long_query_and_documents_are_refused_by_their_beginning(
    load: Load,
    reranker_folder: Path,
    query: int,
    documents: int,
    message: str,
    read: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with load(reranker_folder, Task.RERANK, max_allowed_chunks=50) as service:
        counted = _CountedCharacters(monkeypatch)
        with pytest.raises(InvalidField, match=message):
            await service.rerank("the cat " * (query // 8), ["the cat " * (documents // 8)])
    assert counted.characters == read


async def test_documents_after_those_of_too_many_parts_are_not_tokenized(
    load: Load, reranker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with load(reranker_folder, Task.RERANK, max_allowed_chunks=10_000) as service:
        counted = _CountedCharacters(monkeypatch)
        with pytest.raises(InvalidField, match="the documents have more than 10000 parts of 15 tokens together"):
            await service.rerank("the cat", ["the cat " * 60_000] * 25)
    assert counted.characters < 500_000 * 3


QUERY = "red cat"
DOCUMENTS = ("the cat sat.", "red house", "", "a blue dog ran!")


def pair(query: str, document: list[int]) -> tuple[list[int], list[int]]:
    query_ids = ids_of(query)[1:-1]
    return [2, *query_ids, 3, *document, 3], [0] * (len(query_ids) + 2) + [1] * (len(document) + 1)


async def test_scores_are_those_of_numpy(reranker: Any) -> None:
    scores, tokens = await reranker.rerank(QUERY, DOCUMENTS)
    pairs = [pair(QUERY, ids_of(document)[1:-1]) for document in DOCUMENTS]
    assert scores == pytest.approx([TinyEncoder().score(*each) for each in pairs], abs=1e-5)
    assert tokens == sum(len(ids) for ids, _ in pairs)


async def test_long_document_has_the_score_of_its_best_part(reranker: Any) -> None:
    document = "the cat sat . red house a blue dog ran ! the cat sat . red house ? " * 2
    room = LONGEST - len(ids_of(QUERY)[1:-1]) - 3
    ids = ids_of(document)[1:-1]
    parts = [ids[start : start + room] for start in range(0, len(ids), room)]
    assert (len(ids), len(parts)) == (36, 3)
    scores, tokens = await reranker.rerank(QUERY, ["the", document])
    best = max(TinyEncoder().score(*pair(QUERY, part)) for part in parts)
    assert scores == pytest.approx([TinyEncoder().score(*pair(QUERY, ids_of("the")[1:-1])), best], abs=1e-5)
    assert tokens == sum(len(pair(QUERY, part)[0]) for part in [*parts, [5]])


@pytest.mark.parametrize(
    ("query", "documents", "message"),
    [
        ("the " * 9, ["cat"], "the query may have 8 tokens, half of what the model reads at once; got 9"),
        (QUERY, [], "documents: expected 1 to 2048 items .max_inputs.; got 0"),
        (QUERY, ["the"] * 2049, "documents: expected 1 to 2048 items .max_inputs.; got 2049"),
        (QUERY, ["the " * 20, "cat", "dog"], "the documents have more than 3 parts of 15 tokens together"),
    ],
)
async def test_invalid_queries_and_documents_are_refused(
    load: Load, reranker_folder: Path, query: str, documents: list[str], message: str
) -> None:
    async with load(reranker_folder, Task.RERANK, max_allowed_chunks=3) as service:
        with pytest.raises(InvalidField, match=message):
            await service.rerank(query, documents)


async def test_model_without_logits_is_no_reranker(embedder_folder: Path) -> None:
    (problem,) = await problems_of(embedder_folder, Task.RERANK)
    assert problem.expected == "an output logits [?,1] or [?,2]"
    assert "last_hidden_state" in problem.found


async def test_score_of_two_logits_is_the_share_of_the_second(
    load: Load, reranker_folder: Path, tmp_path: Path
) -> None:
    model = TinyEncoder().model(scores=True)
    logit = model.output(0).get_node().input_value(0)
    both = op.multiply(logit, op.constant(np.array([[0, 1]], np.float32)))
    both.output(0).set_names({"logits"})
    logit.set_names({"raw"})
    folder = shutil.copytree(reranker_folder, tmp_path / "two")
    scored = ov.Model([op.result(both)], model.get_parameters(), "two")
    ov.save_model(scored, folder / "openvino_model.xml", compress_to_fp16=False)
    async with load(folder, Task.RERANK) as service:
        scores, _ = await service.rerank(QUERY, ["the cat"])
    assert scores == pytest.approx([TinyEncoder().score(*pair(QUERY, ids_of("the cat")[1:-1]))], abs=1e-5)


async def tokenized(service: Any, texts: Sequence[str], **options: Any) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in await service.tokenize(texts, **options)]


async def test_tokens_are_those_of_python(embedder: Any) -> None:
    texts = [*TEXTS, "Thé CÄT", "ran 2 houses", "λ the", "the[SEP]cat"]
    made = await tokenized(embedder, texts)
    assert [list(row) for row in made[:-2]] == [ids_of(text) for text in texts[:-2]]
    assert made[-2:] == [(2, 1, ids_of("the")[1], 3), (2, ids_of("the")[1], 3, ids_of("cat")[1], 3)]


async def test_empty_texts_have_only_special_tokens(embedder: Any) -> None:
    assert await tokenized(embedder, ["", "the", ""]) == [(2, 3), tuple(ids_of("the")), (2, 3)]
    assert await tokenized(embedder, [""], add_special_tokens=False) == [()]
    assert await tokenized(embedder, []) == []
    assert await tokenized(embedder, ["  ", "\t"]) == [(2, 3), (2, 3)]


async def test_texts_are_truncated_and_padded_on_request(embedder: Any) -> None:
    the, cat = ids_of("the cat")[1:3]
    cut = await tokenized(embedder, ["the cat the", "cat"], max_length=4)
    assert cut == [(2, the, cat, 3), (2, cat, 3)]
    right = await tokenized(embedder, ["the", "the cat"], max_length=5, padding=Padding.RIGHT)
    assert right == [(2, the, 3, 0, 0), (2, the, cat, 3, 0)]
    left = await tokenized(embedder, ["the", "the cat"], padding=Padding.LEFT, add_special_tokens=False)
    assert left == [(0, the), (the, cat)]
    with pytest.raises(InvalidField, match="max_length must be 2 or more, for the tokens around a text; got 1"):
        await embedder.tokenize(["the"], max_length=1)


async def test_long_texts_nul_and_half_surrogates_are_tokenized(embedder: Any) -> None:
    long, *odd = await tokenized(embedder, ["the cat " * 100_000, "the\0cat", "the \ud800", "the"])
    assert len(long) == 200_002
    assert odd[1:] == [tuple(ids_of("the ?")), tuple(ids_of("the"))]


async def test_no_text_is_tokenized_on_the_event_loop(embedder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A text may have any length, so the time of the first texts decides nothing.
    places: list[bool] = []
    infer = Network.infer

    async def record(self: Network, *arguments: Any) -> Any:
        places.append(self.runs_inline)
        return await infer(self, *arguments)

    monkeypatch.setattr(Network, "infer", record)
    for _ in range(300):
        await embedder.tokenize(["the"])
    assert places == [False] * 300
