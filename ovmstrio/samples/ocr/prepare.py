"""Preparation of the sample ocr: copies the ONNX files for detection, orientation and recognition."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import openvino as ov

from ovmstrio.samples.copying import copy

__all__ = ["CHARACTERS", "ENTRIES", "read_characters_of"]

CHARACTERS: Final = "characters.txt"
_READER: Final = "PP-OCRv6_rec_small.onnx"


def read_characters_of(reader: Path) -> str:
    """Load the characters that a recognition model knows, one per line, from its file."""
    listed: Any = ov.Core().read_model(reader).get_rt_info(["framework", "character"])
    return str(getattr(listed, "value", listed))


def write_reader(files: Path, directory: Path) -> None:
    """Write the version directory of the recognition model, with its characters for clients."""
    (directory / CHARACTERS).write_text(read_characters_of(files / _READER), encoding="utf-8")
    shutil.copyfile(files / _READER, directory / "model.onnx")


ENTRIES = {
    "ocr_det": copy("PP-OCRv6_det_small.onnx"),
    "ocr_cls": copy("ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
    "ocr_rec": write_reader,
}
