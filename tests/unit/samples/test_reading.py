from __future__ import annotations

import json
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from ovmstrio_samples.embedding import safetensors
from ovmstrio_samples.embedding.wordpiece import WordPieces
from ovmstrio_samples.face_detection.client import faces
from ovmstrio_samples.image_classifier import torch_file
from ovmstrio_samples.ocr.regions import Box, regions
from ovmstrio_samples.speech import ct2_file
from ovmstrio_samples.speech.hearing import RATE, Tokens, log_mel


class _Named:
    """Pickles as a call of any function at all."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


def _torch_file(path: Path, content: object) -> Path:
    with path.open("wb") as file:
        for value in (0x1950A86A20F9469CFC6C, 1001, {}, content, []):
            pickle.dump(value, file)
    return path


def test_a_torch_file_cannot_run_code(tmp_path: Path) -> None:
    """A file that asks for a function beside those of tensors is refused before it is called."""
    path = _torch_file(tmp_path / "evil.pth", _Named(sys.exit, "run"))
    with pytest.raises(pickle.UnpicklingError, match=r"sys\.exit, which is refused"):
        torch_file.read(path)


def test_a_file_that_is_no_torch_file_is_refused(tmp_path: Path) -> None:
    """Any other pickle is told apart by its first number."""
    path = tmp_path / "other.pth"
    path.write_bytes(pickle.dumps(7))
    with pytest.raises(ValueError, match="is not a file of torch"):
        torch_file.read(path)


def test_safetensors_are_read_by_their_header(tmp_path: Path) -> None:
    """Types, shapes and places come from the header, whatever the alignment."""
    small, large = np.arange(3, dtype="<f2"), np.arange(6, dtype="<f4").reshape(2, 3)
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "small": {"dtype": "F16", "shape": [3], "data_offsets": [0, 6]},
            "large": {"dtype": "F32", "shape": [2, 3], "data_offsets": [6, 30]},
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + small.tobytes() + large.tobytes())
    tensors = safetensors.read(path)
    assert set(tensors) == {"small", "large"}
    np.testing.assert_array_equal(tensors["small"], small)
    np.testing.assert_array_equal(tensors["large"], large)


def test_words_are_split_into_the_longest_pieces() -> None:
    """Known pieces are taken from the front; accents and case are dropped; what is unknown is marked."""
    table = {
        piece: number
        for number, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", ","])
    }
    encoded = WordPieces(table).encode(["Unaffable, café", "xyz"])
    assert encoded["input_ids"].tolist() == [[2, 4, 5, 6, 8, 7, 3], [2, 1, 3, 0, 0, 0, 0]]
    assert encoded["attention_mask"].tolist() == [[1] * 7, [1, 1, 1, 0, 0, 0, 0]]
    assert WordPieces(table).encode(["un " * 50], longest=5)["input_ids"].tolist() == [[2, 4, 4, 4, 3]]


def test_regions_that_touch_are_one() -> None:
    """A U is one region although its arms begin apart; what lies alone is another."""
    mask = np.zeros((8, 12), bool)
    mask[1:5, 1] = mask[1:5, 5] = mask[5, 1:6] = True
    mask[2:4, 8:11] = True
    assert regions(mask) == [Box(1, 1, 6, 6), Box(8, 2, 11, 4)]
    assert regions(np.zeros((4, 4), bool)) == []


def test_boxes_that_overlap_are_one_face() -> None:
    """Two neighbouring boxes become one, at their mean place in the picture; a distant one is another."""
    scores = np.full((1, 896, 1), -100.0)
    places = np.zeros((1, 896, 16))
    for row, score in ((0, 3.0), (1, 2.0), (511, 1.0)):
        scores[0, row] = score
        places[0, row, :4] = 0, 0, 8, 8
    found = faces({"classificators": scores, "regressors": places}, height=128, width=128)
    assert [(face.left, face.top, face.right, face.bottom) for face in found] == [(0, 0, 8, 8), (120, 120, 128, 128)]
    assert [round(face.score, 3) for face in found] == [0.953, 0.731]


def test_tensors_of_a_ctranslate2_file_are_read_in_order(tmp_path: Path) -> None:
    """Name, shape, type and numbers of each tensor come out; any other file is refused."""
    half, bias = np.arange(6, dtype="<f2").reshape(2, 3), np.arange(2, dtype="<f4")

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    def tensor(name: str, kind: int, values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> bytes:
        shape = struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        return text(name) + shape + struct.pack("<BI", kind, values.nbytes) + values.tobytes()

    path = tmp_path / "model.bin"
    start = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 2)
    path.write_bytes(start + tensor("a/weight", 4, half) + tensor("a/bias", 0, bias))
    tensors = ct2_file.read(path)
    assert list(tensors) == ["a/weight", "a/bias"]
    np.testing.assert_array_equal(tensors["a/weight"], half)
    np.testing.assert_array_equal(tensors["a/bias"], bias)
    path.write_bytes(struct.pack("<I", 6) + text("OtherSpec"))
    with pytest.raises(ValueError, match="is not a WhisperSpec file of version 6"):
        ct2_file.read(path)


def test_a_tone_is_heard_in_its_band_and_silence_in_none() -> None:
    """A second of 1,000 Hz is loudest in one band for 100 steps of 10 ms; what follows is silent."""
    mel = log_mel(np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE).astype(np.float32))
    assert mel.shape == (1, 80, 3000)
    assert mel.dtype == np.float32
    assert set(mel[0, :, 5:95].argmax(axis=0)) == {26}
    assert mel[0, :, 110:].max() == pytest.approx(mel.min())
    assert mel.max() - mel.min() == pytest.approx(2, abs=1e-5)


def test_tokens_become_text_byte_by_byte(tmp_path: Path) -> None:
    """Blanks and letters of several bytes stand as other letters in the table; unknown tokens add nothing."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"\u0120caf": 0, "\u00c3\u00a9": 1, "!": 2}}}))
    assert Tokens.read(path).decode([0, 1, 2, 99]) == " caf\u00e9!"
