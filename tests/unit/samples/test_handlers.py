"""The handlers of the samples, called as the server calls them, without a server."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import ovmstrio_samples
from ovmstrio_samples.image_pipeline.client import COFFEE
from pyovms import Tensor

_SAMPLES = Path(ovmstrio_samples.__file__).parent


def _load(sample: str, filename: str) -> Any:
    """Import a handler by its path, and make its object."""
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
    """Words come one by one and their number at last, however the client has sent the text."""
    outputs = list(_load("counter_stream", "counter.py").execute([Tensor("text", text, [1], "BYTES")]))
    assert [[tensor.name for tensor in tensors] for tensors in outputs] == [["word"], ["word"], ["word"], ["count"]]
    assert [_text(tensors[0]) for tensors in outputs[:3]] == ["a", "b", "a"]
    assert np.asarray(outputs[3][0]).tolist() == [3]


def test_a_picture_file_becomes_pixels() -> None:
    """Any format that Pillow reads gives one RGB picture, with or without the length in front."""
    model = _load("image_pipeline", "preprocess.py")
    for tensor in (Tensor("image", COFFEE.read_bytes()), _framed(COFFEE.read_bytes())):
        (pixels,) = model.execute([tensor])
        assert (pixels.name, pixels.shape, pixels.datatype) == ("pixels_py", (1, 200, 300, 3), "UINT8")
    grey = io.BytesIO()
    Image.new("L", (5, 4), 7).save(grey, "PNG")
    (pixels,) = model.execute([_framed(grey.getvalue())])
    assert np.unique(np.asarray(pixels)).tolist() == [7]


def test_the_likeliest_class_gets_its_name() -> None:
    """Label and score come from the largest probability."""
    model = _load("image_pipeline", "postprocess.py")
    model.initialize({"base_path": str(_SAMPLES / "image_pipeline")})
    probabilities = np.zeros((1, 1000), np.float32)
    probabilities[0, 967] = 0.75
    label, score = model.execute([Tensor("probabilities_py", probabilities)])
    assert _text(label) == "espresso"
    assert np.asarray(score).tolist() == [0.75]
    assert score.datatype == "FP32"
