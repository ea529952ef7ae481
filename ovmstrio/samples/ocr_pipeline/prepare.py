"""Preparation of the sample ocr_pipeline: writes models with built-in preprocessing, and the custom nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.conversion import save
from ovmstrio.samples.copying import copy_files
from ovmstrio.samples.ocr.prepare import read_characters_of

__all__ = ["ENTRIES"]

_DETECTOR: Final = "PP-OCRv6_det_small.onnx"
_READER: Final = "PP-OCRv6_rec_small.onnx"
_HEIGHT: Final = 48
_PIXELS_A_STEP: Final = 8
_copy_nodes = copy_files(__file__, "decode.py", "cut.py", "rectangles.py", "spell.py")


def _normalised(pixels: ov.Output) -> ov.Node:
    """Normalise UINT8 [1,height,width,3] to FP32 [1,3,height,width] between -1 and 1."""
    scaled = op.divide(op.convert(pixels, np.float32), np.float32(127.5))
    return op.transpose(op.subtract(scaled, np.float32(1)), np.array([0, 3, 1, 2]))


def _named(node: ov.Node, name: str) -> ov.Node:
    node.output(0).set_names({name})
    return node


def _pictures(name: str, height: int) -> ov.Node:
    return _named(op.parameter(ov.PartialShape([1, height, -1, 3]), np.uint8, name=name), name)


def _core(model: ov.Model, given: ov.Node) -> ov.Output:
    """Connect ``picture`` to the input of a model and return the model's only output."""
    (parameter,) = model.get_parameters()
    parameter.output(0).replace(given.output(0))
    return model.output(0).node.input_value(0)


def write_detector(files: Path, directory: Path) -> None:
    """Write ``picture`` UINT8 [1,-1,-1,3] -> ``likely`` FP32 [1,1,-1,-1]."""
    picture = _pictures("picture", -1)
    likely = op.convert(_core(ov.Core().read_model(files / _DETECTOR), _normalised(picture.output(0))), np.float32)
    save(ov.Model([op.result(_named(likely, "likely"))], [picture], "detector"), directory)


def write_reader(files: Path, directory: Path) -> None:
    """Write ``line`` UINT8 [1,48,-1,3], ``width`` INT32 [1,1] -> ``characters`` INT32 [1,-1], ``likely`` FP32 [1,-1].

    Lines are padded to equal widths.  The model crops the padding before it reads, and pads its outputs with blank
    steps to equal lengths.
    """
    line, width = _pictures("line", _HEIGHT), _named(op.parameter([1, 1], np.int32, name="width"), "width")
    zero, one, axis = (np.array([value]) for value in (0, 1, 2))
    end = op.reshape(op.convert(width, np.int64), np.array([1]), special_zero=False)
    used = op.slice(line, zero, end, one, axis)
    classes = _core(ov.Core().read_model(files / _READER), _normalised(used.output(0)))
    best = op.topk(classes, np.int64(1), 2, "max", "none", index_element_type="i32")
    columns = op.gather(op.shape_of(line, "i64"), axis, np.int64(0))
    steps = op.gather(op.shape_of(classes, "i64"), one, np.int64(0))
    missing = op.subtract(op.divide(columns, np.array([_PIXELS_A_STEP])), steps)
    padding = op.concat([op.constant(np.array([0])), missing], 0)
    outputs = [
        op.result(_named(op.pad(op.squeeze(found, axis), np.array([0, 0]), padding, "constant", nothing), name))
        for found, nothing, name in (
            (best.output(1), np.int32(0), "characters"),
            (best.output(0), np.float32(0), "likely"),
        )
    ]
    save(ov.Model(outputs, [line, width], "reader"), directory)


def write_nodes(files: Path, directory: Path) -> None:
    """Write the custom nodes, and the characters for the node ``spell``."""
    _copy_nodes(files, directory)
    characters = read_characters_of(files / _READER)
    (directory / "characters.txt").write_text(characters, encoding="utf-8")


ENTRIES = {"ocr_pipeline_det": write_detector, "ocr_pipeline_rec": write_reader, "ocr_pipeline": write_nodes}
