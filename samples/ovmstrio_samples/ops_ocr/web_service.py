"""Reads the text in pictures: one Op finds the lines, the next one reads them."""

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

from ovmstrio_samples.ocr.reading import read_characters, spell
from ovmstrio_samples.ocr_pipeline.rectangles import corners, in_reading_order, text_rectangles, upright
from paddle_serving_server.web_service import Op, WebService

NO_PICTURE: Final = 101
"""The error code for a request whose ``image`` is nothing that OpenCV reads."""

_SHORTER_SIDE: Final = 416
_GRID: Final = 32
_LINE_HEIGHT: Final = 48
_NARROWEST: Final = 320
_WIDEST: Final = 3200
_WIDENING: Final = 1.2
_LIKELY, _LIKELY_BOX, _GROWTH = 0.3, 0.3, 1.6


def _blob(bgr: NDArray[Any], width: int, height: int) -> NDArray[Any]:
    """Give FP32 [1,3,height,width] between -1 and 1."""
    return np.asarray(cv2.dnn.blobFromImage(bgr, 1 / 127.5, (width, height), (127.5, 127.5, 127.5)))


def _decoded(image: str) -> NDArray[Any] | None:
    """Read a picture file in base64; None if it is none."""
    try:
        file = np.frombuffer(base64.b64decode(image), np.uint8)
    except ValueError:
        return None
    return cv2.imdecode(file, cv2.IMREAD_COLOR) if file.size else None


class DetOp(Op):
    """Finds the lines of text: a picture file in base64 becomes pixels and the corners of each line."""

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Enlarge small pictures, so that small text can be found."""
        ((_, request),) = input_dicts.items()
        picture = _decoded(request["image"])
        if picture is None:
            return {}, False, NO_PICTURE, "image is no picture that OpenCV can read, in base64"
        self.picture = picture
        scale = max(1.0, _SHORTER_SIDE / min(picture.shape[:2]))
        height, width = (max(_GRID, round(side * scale / _GRID) * _GRID) for side in picture.shape[:2])
        return {"x": _blob(picture, width, height)}, False, None, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Turn the map of where text is likely into boxes."""
        likely = fetch_data["likely"][0, 0]
        scale = np.array(self.picture.shape[1::-1]) / likely.shape[::-1]
        rectangles = text_rectangles(likely, _LIKELY, _LIKELY_BOX, _GROWTH)
        found = [corners(rectangle, scale, self.picture.shape) for rectangle in rectangles]
        boxes = in_reading_order(np.array(found, np.int32).reshape(-1, 4, 2))
        return {"picture": self.picture, "boxes": boxes}, None, ""


def _by_width(lines: Sequence[NDArray[Any]]) -> list[list[int]]:
    """Group lines, by their numbers, so that none becomes much wider when all of a group are made equally wide."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lines)), key=lambda each: lines[each].shape[1]):
        if not groups or lines[number].shape[1] > _WIDENING * max(_NARROWEST, lines[groups[-1][0]].shape[1]):
            groups.append([])
        groups[-1].append(number)
    return groups


def _fitted(lines: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Make lines what the model takes, with grey behind their ends."""
    widest = max(_NARROWEST, *(line.shape[1] for line in lines))
    fitted = np.zeros((len(lines), 3, _LINE_HEIGHT, -(-widest // _GRID) * _GRID), np.float32)
    for place, line in zip(fitted, lines, strict=True):
        place[..., : line.shape[1]] = _blob(line, line.shape[1], _LINE_HEIGHT)
    return fitted


class RecOp(Op):
    """Reads lines; those of about one width are a feed."""

    def init_op(self) -> None:
        """Read what the model's classes stand for."""
        self.characters = read_characters(Path("characters.txt"))

    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Cut the lines out; a picture without text has none, and nothing is inferred."""
        found = input_dicts["det"]
        lines = [upright(found["picture"], box, _LINE_HEIGHT, _WIDEST) for box in found["boxes"]]
        self.groups = _by_width(lines)
        return [{"x": _fitted([lines[number] for number in group])} for group in self.groups], False, None, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        """Spell the lines, and put them in their order again; what is answered has to be text."""
        numbers = [number for group in self.groups for number in group]
        rows = [row for read in fetch_data for row in read["likely"]]
        texts = [spell(row, self.characters) for _, row in sorted(zip(numbers, rows, strict=True), key=itemgetter(0))]
        boxes = input_dicts["det"]["boxes"].tolist()
        return {"texts": json.dumps(texts, ensure_ascii=False), "boxes": json.dumps(boxes)}, None, ""


class OcrService(WebService):
    """The pipeline."""

    def get_pipeline_response(self, read_op: Op) -> Op:
        """Put the Ops behind each other."""
        return RecOp(name="rec", input_ops=[DetOp(name="det", input_ops=[read_op])])


if __name__ == "__main__":
    ocr_service = OcrService(name="ocr")
    ocr_service.prepare_pipeline_config("config.yml")
    ocr_service.run_service()
