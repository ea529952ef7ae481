from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.conversion import Conversion, convert
from ovmstrio.openvino.conversion.inputs import parse_input_form


def _source(folder: Path, shape: ov.PartialShape) -> Path:
    x = op.parameter(shape, np.float32, name="x")
    x.output(0).set_names({"x"})
    product = op.matmul(x, np.ones((4, 2), np.float32), transpose_a=False, transpose_b=False)
    product.output(0).set_names({"y"})
    ov.save_model(ov.Model([op.result(product)], [x], "product"), folder / "product.xml")
    return folder / "product.xml"


@pytest.mark.parametrize(
    ("told", "inputs", "outputs"),
    [
        ("x=FP32[1,4]", "FP32 [1,4]", "FP32 [1,2]"),
        ("x=[-1, 4]", "FP32 [-1,4]", "FP32 [-1,2]"),
        ("x=fp32(2:8,4)", "FP32 [[2~8],4]", "FP32 [[2~8],2]"),
    ],
)
def test_an_input_gets_the_form_that_is_told(tmp_path: Path, told: str, inputs: str, outputs: str) -> None:
    """Sizes are fixed, free or ranges; the type may be left out where the file has it."""
    wanted = Conversion(inputs=dict([parse_input_form(told)]))
    converted = convert(_source(tmp_path, ov.PartialShape.dynamic()), tmp_path, "product", wanted=wanted)
    assert [str(spec) for spec in converted.inputs] == [inputs]
    assert [str(spec) for spec in converted.outputs] == [outputs]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("x=FP32[1,5]", r"'x' has the shape \[\?,4\], and not \[1,5\]"),
        ("x=INT64[1,4]", "'x' is FP32, and not INT64; leave the type out"),
        ("xx=[1,4]", "no input 'xx'; did you mean x?"),
        ("image=[1,4]", "no input 'image'; it has x"),
    ],
)
def test_a_form_that_the_model_has_not_is_refused(tmp_path: Path, told: str, said: str) -> None:
    """Names, types and sizes each by themselves."""
    wanted = Conversion(inputs=dict([parse_input_form(told)]))
    with pytest.raises(ConfigError, match=said):
        convert(_source(tmp_path, ov.PartialShape([-1, 4])), tmp_path / "models", "product", wanted=wanted)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("x", r"expected NAME=TYPE\[SIZES\] such as .*, got 'x'"),
        ("x=FP33[1]", "'FP33' is no element type; known are BOOL"),
        ("x=FP32[a]", "'a' is no dimension"),
    ],
)
def test_a_form_that_cannot_be_read_is_told(told: str, said: str) -> None:
    """Each part by itself."""
    with pytest.raises(ConfigError, match=said):
        parse_input_form(told)
