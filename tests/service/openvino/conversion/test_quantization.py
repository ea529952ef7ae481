from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.conversion import Conversion, Converted, convert
from tests.support.servables import EXACT

RANDOM = np.random.default_rng(0)
needs_nncf = pytest.mark.skipif(find_spec("nncf") is None, reason="quantization needs the extra quantize")


def _named(node: ov.Node, name: str) -> ov.Node:
    node.output(0).set_names({name})
    return node


def _picture_model(folder: Path) -> Path:
    x = _named(op.parameter([-1, 3, 8, 8], np.float32, name="x"), "x")
    bias = _named(op.parameter([-1, 64, 1, 1], np.float32, name="bias"), "bias")
    weights = RANDOM.normal(size=(64, 3, 3, 3)).astype(np.float32)
    convolved = op.relu(op.convolution(x, weights, [1, 1], [0, 0], [0, 0], [1, 1]))
    model = ov.Model([op.result(_named(op.add(convolved, bias), "y"))], [bias, x], "pictures")
    ov.save_model(model, folder / "pictures.xml", compress_to_fp16=False)
    return folder / "pictures.xml"


def _samples(folder: Path) -> Path:
    for number in range(8):
        for name, shape in (("x", (1, 3, 8, 8)), ("bias", (1, 64, 1, 1))):
            (folder / "samples" / name).mkdir(parents=True, exist_ok=True)
            np.save(folder / "samples" / name / f"{number}.npy", RANDOM.normal(size=shape).astype(np.float32))
    return folder / "samples"


def _run(converted: Converted, x: object, bias: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    compiled = ov.Core().compile_model(converted.directory / "model.xml", "CPU", EXACT)
    return np.array(compiled({"x": x, "bias": bias}, share_inputs=True)[0])


@needs_nncf
def test_quantized_model_is_smaller_and_computes_nearly_the_same(tmp_path: Path) -> None:
    source = _picture_model(tmp_path)
    full = convert(source, tmp_path, "full")
    small = convert(source, tmp_path, "small", wanted=Conversion(calibration=_samples(tmp_path)))
    assert (small.samples, full.samples) == (8, 0)
    assert (small.inputs, small.outputs) == (full.inputs, full.outputs)
    sizes = [(each.directory / "model.bin").stat().st_size for each in (small, full)]
    assert sizes[0] < 0.5 * sizes[1]
    x, bias = RANDOM.normal(size=(2, 3, 8, 8)).astype(np.float32), np.zeros((2, 64, 1, 1), np.float32)
    approximate, exact = (_run(each, x, bias).ravel() for each in (small, full))
    assert np.corrcoef(approximate, exact)[0, 1] > 0.99
    assert not np.array_equal(approximate, exact)


@needs_nncf
def test_samples_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    samples = _samples(tmp_path)
    np.save(samples / "x" / "8.npy", np.ones((1, 3, 8), np.float32))
    np.save(samples / "bias" / "8.npy", np.ones((1, 64, 1, 1), np.float32))
    with pytest.raises(ConfigError, match=r"x/8\.npy: has the shape \[1,3,8\]; input 'x' is FP32 \[-1,3,8,8\]"):
        convert(_picture_model(tmp_path), tmp_path / "models", "m", wanted=Conversion(calibration=samples))
    assert not (tmp_path / "models").exists()


@needs_nncf
def test_infinite_samples_are_refused(tmp_path: Path) -> None:
    samples = _samples(tmp_path)
    np.save(samples / "x" / "3.npy", np.full((1, 3, 8, 8), np.nan, np.float32))
    with pytest.raises(ConfigError, match=r"x/3\.npy: holds numbers that are not finite"):
        convert(_picture_model(tmp_path), tmp_path / "models", "m", wanted=Conversion(calibration=samples))


@needs_nncf
def test_model_without_anything_to_quantize_is_refused(tmp_path: Path) -> None:
    x = _named(op.parameter([1, 3], np.float32, name="x"), "x")
    ov.save_model(ov.Model([op.result(_named(op.relu(x), "y"))], [x], "relu"), tmp_path / "relu.xml")
    (tmp_path / "samples").mkdir()
    np.save(tmp_path / "samples" / "a.npy", np.ones((1, 3), np.float32))
    with pytest.raises(ConfigError, match="leave out --quantize"):
        convert(tmp_path / "relu.xml", tmp_path, "relu", wanted=Conversion(calibration=tmp_path / "samples"))


def test_missing_nncf_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"quantization needs nncf; \S+ -m pip install .*\[quantize\]"):
        convert(_picture_model(tmp_path), tmp_path, "m", wanted=Conversion(calibration=_samples(tmp_path)))
