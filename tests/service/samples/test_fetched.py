"""The samples whose models are fetched, with the answers that they are known to give; needs wheels in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from platformdirs import user_cache_path

from ovmstrio_samples import pictures
from ovmstrio_samples.catalog import BY_NAME
from ovmstrio_samples.embedding import client as embedding
from ovmstrio_samples.embedding.wordpiece import WordPieces
from ovmstrio_samples.face_detection import client as face_detection
from ovmstrio_samples.image_classifier import client as image_classifier
from ovmstrio_samples.ocr import client as ocr
from ovmstrio_samples.ocr.prepare import CHARACTERS
from ovmstrio_samples.orientation import client as orientation
from ovmstrio_samples.pitch import client as pitch
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.question import Ask, Question
from ovmstrio_samples.vad import client as vad

pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Give the folder of a model repository."""
    return tmp_path / "models"


@pytest.fixture
def prepared(repository: Path, ask_folder: Callable[[Path], Ask]) -> Callable[[str], Ask]:
    """Give what prepares a sample from the user's cache, and skips the test where that would need the network."""

    def prepare(name: str) -> Ask:
        sample, cache = BY_NAME[name], user_cache_path("ovmstrio") / "wheels"
        if sample.wheel is None or not (cache / sample.wheel.filename).is_file():
            pytest.skip(f"not in the cache: ovms prepare --sample {name}")
        prepare_sample(sample, repository, 1, cache)
        return ask_folder(repository)

    return prepare


def _check(ask: Ask, questions: list[Question]) -> None:
    answers = {
        (question.model, question.subject): question.read(ask(question.model, question.inputs))
        for question in questions
    }
    assert answers == {(question.model, question.subject): question.expected for question in questions}


def test_a_page_is_told_from_the_same_page_turned(prepared: Callable[[str], Ask]) -> None:
    """The four positions of a drawn page are recognised."""
    _check(prepared("orientation"), orientation.questions())


def test_notes_are_heard_by_every_format_of_the_model(prepared: Callable[[str], Ask]) -> None:
    """ONNX, TensorFlow Lite and SavedModel hear 440 Hz and C major."""
    _check(prepared("pitch"), pitch.questions())


def test_texts_that_mean_alike_are_near(prepared: Callable[[str], Ask], repository: Path) -> None:
    """Each text is nearest to its paraphrase; vectors have length one, padded or not."""
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


def test_drawn_text_is_read(prepared: Callable[[str], Ask], repository: Path) -> None:
    """Three lines come back as they were drawn, in order."""
    lines = ["Three models read this page", "one after the other.", "Total: 1,234.56 EUR (42%)"]
    ask = prepared("ocr")
    characters = ocr.read_characters(repository / "ocr_rec" / "1" / CHARACTERS)
    assert ocr.read_text(ask, pictures.page(lines), characters) == lines
    assert ocr.read_text(ask, np.full((200, 200, 3), 255, np.uint8), characters) == []


def test_noise_is_no_speech(prepared: Callable[[str], Ask]) -> None:
    """Neither silence nor noise is taken for speech, window after window."""
    ask = prepared("vad")
    noise = (np.random.default_rng(0).normal(size=vad.RATE) * 0.1).astype(np.float32)
    assert len(list(vad.speech(ask, noise))) == vad.RATE // 512
    assert max(vad.speech(ask, noise)) < 0.5
    assert max(vad.speech(ask, np.zeros(vad.RATE, np.float32))) < 0.5


def test_plain_pictures_hold_no_face_and_have_a_class(prepared: Callable[[str], Ask]) -> None:
    """The detector finds nobody on a page of text, and the classifier's probabilities add up to one at any size."""
    picture = pictures.page(["no face here"])
    question = face_detection.ask_about("a page", picture)
    assert question.read(prepared("face_detection")(question.model, question.inputs)) == "no face"
    question = image_classifier.ask_about("a page", picture)
    outputs = prepared("image_classifier")(question.model, question.inputs)
    assert outputs["probabilities"].shape == (1, 1000)
    assert outputs["probabilities"].sum() == pytest.approx(1, abs=1e-4)
