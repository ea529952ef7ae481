"""Service that reads the text in pictures: one Op finds the lines, the next one reads them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from ovmstrio.samples.ocr.reading import read_characters, spell
from ovmstrio.samples.ocr_pipeline.rectangles import corners, in_reading_order, text_rectangles, upright
from paddle_serving_server.web_service import Op, WebService

NO_PICTURE: Final = 101
"""Error code for a request whose ``image`` OpenCV cannot decode."""

_SHORTER_SIDE: Final = 416
_GRID: Final = 32
_LINE_HEIGHT: Final = 48
_NARROWEST: Final = 320
_WIDEST: Final = 3200
_WIDENING: Final = 1.2
_LIKELY, _LIKELY_BOX, _GROWTH = 0.3, 0.3, 1.6


def _blob(bgr: NDArray[Any], width: int, height: int) -> NDArray[Any]:
    """Normalise to FP32 [1,3,height,width] between -1 and 1."""
    return np.asarray(cv2.dnn.blobFromImage(bgr, 1 / 127.5, (width, height), (127.5, 127.5, 127.5)))


def _decoded(image: str) -> NDArray[Any] | None:
    """Decode a picture file in base64; return None if it is not a picture."""
    try:
        file = np.frombuffer(base64.b64decode(image), np.uint8)
    except ValueError:
        return None
    return cv2.imdecode(file, cv2.IMREAD_COLOR) if file.size else None


class DetOp(Op):
    """Op that finds the lines of text in a picture file in base64."""

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Decode the picture and enlarge a small one, so that small text can be found."""
        ((_, request),) = input_dicts.items()
        picture = _decoded(request["image"])
        if picture is None:
            return {}, False, NO_PICTURE, "image is no picture that OpenCV can read, in base64"
        self.picture = picture
        scale = max(1.0, _SHORTER_SIDE / min(picture.shape[:2]))
        height, width = (max(_GRID, round(side * scale / _GRID) * _GRID) for side in picture.shape[:2])
        return {"x": _blob(picture, width, height)}, False, None, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Convert the detector's map to boxes."""
        likely = fetch_data["likely"][0, 0]
        scale = np.array(self.picture.shape[1::-1]) / likely.shape[::-1]
        rectangles = text_rectangles(likely, _LIKELY, _LIKELY_BOX, _GROWTH)
        found = [corners(rectangle, scale, self.picture.shape) for rectangle in rectangles]
        boxes = in_reading_order(np.array(found, np.int32).reshape(-1, 4, 2))
        return {"picture": self.picture, "boxes": boxes}, None, ""


def _by_width(lines: Sequence[NDArray[Any]]) -> list[list[int]]:
    """Group the indices of lines with similar widths, to limit padding within a group."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lines)), key=lambda each: lines[each].shape[1]):
        if not groups or lines[number].shape[1] > _WIDENING * max(_NARROWEST, lines[groups[-1][0]].shape[1]):
            groups.append([])
        groups[-1].append(number)
    return groups


def _fitted(lines: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Normalise lines and pad their ends with grey to equal widths."""
    widest = max(_NARROWEST, *(line.shape[1] for line in lines))
    fitted = np.zeros((len(lines), 3, _LINE_HEIGHT, -(-widest // _GRID) * _GRID), np.float32)
    for place, line in zip(fitted, lines, strict=True):
        place[..., : line.shape[1]] = _blob(line, line.shape[1], _LINE_HEIGHT)
    return fitted


class RecOp(Op):
    """Op that reads lines; each feed contains lines of similar widths."""

    def init_op(self) -> None:
        """Load the characters of the model's classes."""
        self.characters = read_characters(Path("characters.txt"))

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Crop the lines; a picture without text skips the inference."""
        found = input_dicts["det"]
        lines = [upright(found["picture"], box, _LINE_HEIGHT, _WIDEST) for box in found["boxes"]]
        self.groups = _by_width(lines)
        return [{"x": _fitted([lines[number] for number in group])} for group in self.groups], False, None, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Decode the lines and restore their order; responses must be text."""
        numbers = [number for group in self.groups for number in group]
        rows = [row for read in fetch_data for row in read["likely"]]
        texts = [spell(row, self.characters) for _, row in sorted(zip(numbers, rows, strict=True), key=itemgetter(0))]
        boxes = input_dicts["det"]["boxes"].tolist()
        return {"texts": json.dumps(texts, ensure_ascii=False), "boxes": json.dumps(boxes)}, None, ""


class OcrService(WebService):
    """Pipeline of the sample."""

    def get_pipeline_response(self, read_op: Op) -> Op:
        """Connect the Ops in sequence."""
        return RecOp(name="rec", input_ops=[DetOp(name="det", input_ops=[read_op])])


if __name__ == "__main__":
    ocr_service = OcrService(name="ocr")
    ocr_service.prepare_pipeline_config("config.yml")
    ocr_service.run_service()
