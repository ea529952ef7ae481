from __future__ import annotations

import importlib.util
import io
import json
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import ovmstrio.samples
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.samples.catalog import HANDLERS, ProjectSample
from ovmstrio.samples.embedding.wordpiece import WordPieces
from ovmstrio.samples.face_detection.client import faces
from ovmstrio.samples.image_classifier import torch_file
from ovmstrio.samples.image_pipeline.client import COFFEE
from ovmstrio.samples.ocr.regions import Box, regions
from ovmstrio.samples.speech import ct2_file
from ovmstrio.samples.speech.hearing import RATE, Tokens, log_mel
from pyovms import Tensor

_SAMPLES = Path(ovmstrio.samples.__file__).parent


def _load(sample: str, filename: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"handler_of_{sample}", _SAMPLES / sample / filename)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OvmsPythonModel()


def _text(tensor: Tensor) -> str:
    return bytes(tensor).decode()


def _framed(content: bytes) -> Tensor:
    """Make one element of BYTES as KServe clients send it."""
    return Tensor("image", len(content).to_bytes(4, "little") + content, [1], "BYTES")


@pytest.mark.parametrize("text", [b"a b a", b"\x05\0\0\0a b a"])
def test_the_counter_reads_text_with_and_without_a_length(text: bytes) -> None:
    outputs = list(_load("counter_stream", "counter.py").execute([Tensor("text", text, [1], "BYTES")]))
    assert [[tensor.name for tensor in tensors] for tensors in outputs] == [["word"], ["word"], ["word"], ["count"]]
    assert [_text(tensors[0]) for tensors in outputs[:3]] == ["a", "b", "a"]
    assert np.asarray(outputs[3][0]).tolist() == [3]


def test_pictures_become_pixels_and_probabilities_a_class() -> None:
    model = _load("image_pipeline", "preprocess.py")
    for tensor in (Tensor("image", COFFEE.read_bytes()), _framed(COFFEE.read_bytes())):
        (pixels,) = model.execute([tensor])
        assert (pixels.name, pixels.shape, pixels.datatype) == ("pixels_py", (1, 200, 300, 3), "UINT8")
    grey = io.BytesIO()
    Image.new("L", (5, 4), 7).save(grey, "PNG")
    (pixels,) = model.execute([_framed(grey.getvalue())])
    assert np.unique(np.asarray(pixels)).tolist() == [7]
    model = _load("image_pipeline", "postprocess.py")
    model.initialize({"base_path": str(_SAMPLES / "image_pipeline")})
    probabilities = np.zeros((1, 1000), np.float32)
    probabilities[0, 967] = 0.75
    label, score = model.execute([Tensor("probabilities_py", probabilities)])
    assert _text(label) == "espresso"
    assert np.asarray(score).tolist() == [0.75]
    assert score.datatype == "FP32"


_README = HANDLERS[0].folder.parent / "README.md"


@pytest.mark.parametrize("sample", HANDLERS, ids=lambda sample: sample.name)
def test_listed_handlers_are_documented_projects(sample: ProjectSample) -> None:
    project, warnings = read_project(sample.folder)
    assert not warnings or sample.first
    assert project.name == sample.name
    assert (sample.folder / "client.py").is_file()
    readme = (sample.folder / "README.md").read_text(encoding="utf-8")
    where = Path("models" if sample.first else "ovmstrio/samples") / sample.name
    assert all(command in readme for command in sample.commands(where))
    assert f"[{sample.name}]({sample.name}/README.md)" in _README.read_text(encoding="utf-8")


class _Exit:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return sys.exit, ("run",)


_TORCH_PARTS: tuple[object, ...] = (0x1950A86A20F9469CFC6C, 1001, {}, _Exit(), [])


def test_a_torch_file_cannot_run_code_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(b"".join(pickle.dumps(value) for value in _TORCH_PARTS))
    with pytest.raises(pickle.UnpicklingError, match=r"sys\.exit, which is refused"):
        torch_file.read(path)
    path.write_bytes(pickle.dumps(7))
    with pytest.raises(ValueError, match="is not a file of torch"):
        torch_file.read(path)


def test_words_are_split_into_the_longest_pieces() -> None:
    table = {
        piece: number
        for number, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", ","])
    }
    encoded = WordPieces(table).encode(["Unaffable, café", "xyz"])
    assert encoded["input_ids"].tolist() == [[2, 4, 5, 6, 8, 7, 3], [2, 1, 3, 0, 0, 0, 0]]
    assert encoded["attention_mask"].tolist() == [[1] * 7, [1, 1, 1, 0, 0, 0, 0]]
    assert WordPieces(table).encode(["un " * 50], longest=5)["input_ids"].tolist() == [[2, 4, 4, 4, 3]]


def test_connected_regions_and_overlapping_boxes_are_merged() -> None:
    mask = np.zeros((8, 12), bool)
    mask[1:5, 1] = mask[1:5, 5] = mask[5, 1:6] = True
    mask[2:4, 8:11] = True
    assert regions(mask) == [Box(1, 1, 6, 6), Box(8, 2, 11, 4)]
    assert regions(np.zeros((4, 4), bool)) == []
    scores = np.full((1, 896, 1), -100.0)
    places = np.zeros((1, 896, 16))
    for row, score in ((0, 3.0), (1, 2.0), (511, 1.0)):
        scores[0, row] = score
        places[0, row, :4] = 0, 0, 8, 8
    found = faces({"classificators": scores, "regressors": places}, height=128, width=128)
    assert [(face.left, face.top, face.right, face.bottom) for face in found] == [(0, 0, 8, 8), (120, 120, 128, 128)]
    assert [round(face.score, 3) for face in found] == [0.953, 0.731]


def test_tensors_of_a_ctranslate2_file_are_read_in_order(tmp_path: Path) -> None:
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


def test_a_tone_is_in_its_mel_band() -> None:
    mel = log_mel(np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE).astype(np.float32))
    assert mel.shape == (1, 80, 3000)
    assert mel.dtype == np.float32
    assert set(mel[0, :, 5:95].argmax(axis=0)) == {26}
    assert mel[0, :, 110:].max() == pytest.approx(mel.min())
    assert mel.max() - mel.min() == pytest.approx(2, abs=1e-5)


def test_tokens_are_decoded_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"\u0120caf": 0, "\u00c3\u00a9": 1, "!": 2}}}))
    assert Tokens.read(path).decode([0, 1, 2, 99]) == " caf\u00e9!"
