"""Boxes of object detection models: conversion to COCO results, and drawing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from paddle_serving_app.reader.palette import palette

__all__ = ["BlazeFacePostprocess", "RCNNPostprocess"]

_COLUMNS: Final = 6
_MIN_DRAWN_SCORE: Final = 0.5
_WHITE: Final = (255, 255, 255)

Found = dict[str, Any]
"""``category_id``, ``bbox`` as left, top, width and height in pixels, and ``score``."""


class RCNNPostprocess:
    """Converts rows of class, score, left, top, right and bottom to dictionaries, and draws them.

    Args:
        label_file: class names, one per line.
        output_dir: folder of images and ``bbox.json``, created on demand.
        resize_shape: ignored, as in the original.
    """

    def __init__(self, label_file: str, output_dir: str, resize_shape: Any = None) -> None:
        self.label_file = label_file
        self.output_dir = output_dir
        self.resize_shape = resize_shape
        self.label_list = [line.strip() for line in Path(label_file).read_text(encoding="utf-8").splitlines()]
        self.clsid2catid = {number: number for number in range(len(self.label_list))}
        self.catid2name = dict(enumerate(self.label_list))

    def __call__(self, image_with_bbox: Mapping[str, Any], visualize: bool = True) -> list[Found]:
        """Return the detected objects.

        Args:
            image_with_bbox: a model's outputs, one of them with six columns.  The last number of its ``.lod``, if
                present, is the number of valid rows.  ``image`` is the image file for drawing.
            visualize: write the image and ``bbox.json``.

        Raises:
            ValueError: no output has the shape of boxes.
        """
        found = [self._found(row, image_with_bbox) for row in _rows(image_with_bbox)]
        Path(self.output_dir).mkdir(parents=True, exist_ok=True)
        if visualize:
            self.visualize(image_with_bbox["image"], found)
            (Path(self.output_dir) / "bbox.json").write_text(json.dumps(found, indent=4), encoding="utf-8")
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}(label_file={self.label_file!r}, output_dir={self.output_dir!r})"

    def visualize(self, infer_img: str, bbox_results: list[Found]) -> None:
        """Draw objects with a score of at least 0.5 and write the image to ``output_dir``; blocking."""
        colours = palette(len(self.label_list))
        with Image.open(infer_img) as file:
            image = file.convert("RGB")
        draw = ImageDraw.Draw(image)
        for found in bbox_results:
            if found["score"] >= _MIN_DRAWN_SCORE:
                category = found["category_id"]
                colour = (int(colours[category, 0]), int(colours[category, 1]), int(colours[category, 2]))
                _draw(draw, found["bbox"], f"{self.catid2name[category]} {found['score']:.2f}", colour)
        image.save(Path(self.output_dir) / Path(infer_img).name, quality=95)

    def _found(self, row: list[float], outputs: Mapping[str, Any]) -> Found:
        kind, score, *corners = row
        return {"category_id": self.clsid2catid[int(kind)], "bbox": self._box(corners, outputs), "score": score}

    def _box(self, corners: list[float], outputs: Mapping[str, Any]) -> list[float]:
        left, top, right, bottom = corners
        return [left, top, right - left + 1, bottom - top + 1]


class BlazeFacePostprocess(RCNNPostprocess):
    """Variant for corners between 0 and 1, which are clipped; ``im_shape`` is height and width of the image."""

    def clip_bbox(self, bbox: list[float], im_size: Any = None) -> tuple[float, ...]:
        """Clip corners to width and height, or to 1."""
        height, width = (1.0, 1.0) if im_size is None else im_size[:2]
        return tuple(max(min(value, end), 0.0) for value, end in zip(bbox, (width, height) * 2, strict=True))

    def _box(self, corners: list[float], outputs: Mapping[str, Any]) -> list[float]:
        left, top, right, bottom = self.clip_bbox(corners)
        height, width = np.asarray(outputs["im_shape"]).astype(np.int32).reshape(-1)[:2].tolist()
        return [left * width, top * height, (right - left) * width, (bottom - top) * height]


def _rows(outputs: Mapping[str, Any]) -> Iterator[list[float]]:
    known = {
        name: np.asarray(value)
        for name, value in outputs.items()
        if name != "image" and ".lod" not in name and "im_shape" not in name
    }
    boxes = {name: rows for name, rows in known.items() if rows.shape[1:] == (_COLUMNS,)}
    if not boxes:
        if any(rows.shape == (1, 1) for rows in known.values()):
            return
        shapes = ", ".join(f"{name} {list(rows.shape)}" for name, rows in known.items()) or "no outputs"
        raise ValueError(f"boxes are [number, {_COLUMNS}], got {shapes}")
    name, rows = boxes.popitem()
    offsets: NDArray[Any] = np.asarray(outputs.get(f"{name}.lod", [len(rows)])).reshape(-1)
    yield from rows[: int(offsets[-1])].tolist()


def _draw(draw: ImageDraw.ImageDraw, box: list[float], label: str, colour: tuple[int, int, int]) -> None:
    left, top, width, height = box
    right, bottom = left + width, top + height
    draw.line([(left, top), (left, bottom), (right, bottom), (right, top), (left, top)], width=2, fill=colour)
    _, _, text_width, text_height = draw.textbbox((0, 0), label)
    draw.rectangle([(left + 1, top - text_height), (left + text_width + 1, top)], fill=colour)
    draw.text((left + 1, top - text_height), label, fill=_WHITE)
