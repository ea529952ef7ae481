"""Image readers: decoding, transforms, and postprocessing of detection, segmentation and text models.

Images are arrays [height, width, channels], BGR UINT8 after decoding.  Decoding returns None for data that is not
an image.  Detection transforms take and return an image and its info: ``im_shape``, the current height and width, and
``scale_factor``, their scale; both FP32.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from paddle_serving_app.reader import functional
from paddle_serving_app.reader.opencv import cv2

__all__ = [
    "BGR2RGB",
    "RGB2BGR",
    "Base64ToImage",
    "BlazeFacePostprocess",
    "CenterCrop",
    "DBPostProcess",
    "DetectionBGR2RGB",
    "DetectionDiv",
    "DetectionFile2Image",
    "DetectionNormalize",
    "DetectionPadStride",
    "DetectionResize",
    "DetectionSequential",
    "DetectionTranspose",
    "Div",
    "File2Image",
    "FilterBoxes",
    "GetRotateCropImage",
    "ImageReader",
    "Lambda",
    "Normalize",
    "PadStride",
    "RCNNPostprocess",
    "Resize",
    "ResizeByFactor",
    "SegPostprocess",
    "Sequential",
    "SortedBoxes",
    "String2Image",
    "Transpose",
    "URL2Image",
    "generate_colormap",
]

# Decoding


def decoded(file: bytes) -> NDArray[np.uint8] | None:
    """Decode an image file; None if OpenCV does not recognise it.

    Raises:
        cv2.error: the file is empty.
    """
    image: Any = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
    found: NDArray[np.uint8] | None = image
    return found


@dataclass
class String2Image:
    """Decoder of the bytes of an image file."""

    def __call__(self, img_buffer: bytes) -> NDArray[np.uint8] | None:
        return decoded(img_buffer)


@dataclass
class File2Image:
    """Reader of an image file; blocking."""

    def __call__(self, img_path: str | Path) -> NDArray[np.uint8] | None:
        return decoded(Path(img_path).read_bytes())


@dataclass
class URL2Image:
    """Reader of an image at a URL; blocking, with a socket timeout in seconds.

    The caller must check untrusted URLs: any address, including ``file:``, is opened.
    """

    timeout: float = 60

    def __call__(self, img_url: str) -> NDArray[np.uint8] | None:
        with urlopen(img_url, timeout=self.timeout) as answer:  # noqa: S310 - file URLs are supported
            return decoded(answer.read())


@dataclass
class Base64ToImage:
    """Decoder of a base64 image file."""

    def __call__(self, img_base64: str | bytes) -> NDArray[np.uint8] | None:
        return decoded(b64decode(img_base64))


# Transforms


@dataclass
class Sequential:
    """Sequence of transforms."""

    transforms: Sequence[Callable[[Any], Any]]

    def __call__(self, img: Any) -> Any:
        for transform in self.transforms:
            img = transform(img)
        return img


@dataclass
class Lambda:
    """Transform by a function."""

    lambd: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.lambd):
            raise TypeError(f"Lambda takes a function, got {type(self.lambd).__name__}")

    def __call__(self, img: Any) -> Any:
        return self.lambd(img)


@dataclass
class RGB2BGR:
    """Channel reversal; a view."""

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return img[:, :, ::-1]


@dataclass
class BGR2RGB(RGB2BGR):
    """Channel reversal; a view."""


@dataclass
class Div:
    """Division in FP32."""

    value: float

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return img.astype(np.float32) / self.value


@dataclass
class Normalize:
    """Normalization by mean and deviation of each channel; FP32 copy."""

    mean: Sequence[float]
    std: Sequence[float]
    channel_first: bool = False

    def __call__(self, img: NDArray[Any]) -> NDArray[np.float32]:
        return functional.normalize(img, self.mean, self.std, self.channel_first)


@dataclass
class CenterCrop:
    """Square crop at the center; a view."""

    size: int

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.crop(img, self.size)


@dataclass
class Resize:
    """Resize to (width, height), or the shorter side to ``size``; no side exceeds ``max_size``."""

    size: int | tuple[int, int]
    max_size: int = 2**31 - 1
    interpolation: int | None = None

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.resize(img, self.size, self.max_size, self.interpolation)


@dataclass
class Transpose:
    """Axis permutation; a view."""

    transpose_target: Sequence[int]

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return functional.transpose(img, self.transpose_target)


def padded(img: NDArray[Any], stride: int) -> NDArray[Any]:
    """Zero-pad [channels, height, width] at bottom and right to multiples of ``stride``; FP32; 0 changes nothing."""
    if stride <= 0:
        return img
    channels, height, width = img.shape
    result = np.zeros((channels, -(-height // stride) * stride, -(-width // stride) * stride), np.float32)
    result[:, :height, :width] = img
    return result


@dataclass
class PadStride:
    """Zero padding of [channels, height, width] at bottom and right to multiples of ``stride``; FP32."""

    stride: int

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        return padded(img, self.stride)


@dataclass
class ResizeByFactor:
    """Resize of both sides to multiples of ``factor``, rounded down, the longer side to at most ``max_side_len``.

    As in the original, a side that is not a multiple also loses one ``factor``.
    """

    factor: int = 32
    max_side_len: int = 2400

    def __call__(self, img: NDArray[Any]) -> NDArray[Any]:
        ratio = min(1.0, self.max_side_len / max(img.shape[:2]))
        height, width = (self._round_down(int(side * ratio)) for side in img.shape[:2])
        return cv2.resize(img, (width, height))

    def _round_down(self, side: int) -> int:
        if side > 0 and side % self.factor == 0:
            return side
        return max(1, side // self.factor - 1) * self.factor


# Object detection


Info = dict[str, Any]
"""Info of an image."""

_Pair = tuple[NDArray[Any], Info | None]


@dataclass
class DetectionSequential:
    """Sequence of transforms of a file name or image."""

    transforms: Sequence[Callable[[Any, Info], tuple[Any, Info]]]

    def __call__(self, im: Any) -> tuple[Any, Info]:
        info: Info = {"scale_factor": np.ones(2, np.float32), "im_shape": None}
        for transform in self.transforms:
            im, info = transform(im, info)
        return im, info


@dataclass
class DetectionFile2Image:
    """Reader of an image file as RGB; blocking.

    Raises:
        ValueError: the file is not an image.
    """

    def __call__(self, img_path: str | Path, im_info: Info | None = None) -> _Pair:
        file = np.frombuffer(Path(img_path).read_bytes(), np.uint8)
        found: Any = cv2.imdecode(file, cv2.IMREAD_COLOR)
        if found is None:
            raise ValueError(f"{img_path} is not an image that OpenCV can read")
        if im_info is not None:
            im_info["im_shape"] = np.array(found.shape[:2], np.float32)
            im_info["scale_factor"] = np.ones(2, np.float32)
        return cv2.cvtColor(found, cv2.COLOR_BGR2RGB), im_info


@dataclass
class DetectionBGR2RGB:
    """Channel reversal; a view."""

    def __call__(self, img: NDArray[Any], img_info: Info | None = None) -> _Pair:
        return img[:, :, ::-1], img_info


@dataclass
class DetectionDiv:
    """Division in FP32."""

    value: float

    def __call__(self, img: NDArray[Any], img_info: Info | None = None) -> _Pair:
        return img.astype(np.float32) / self.value, img_info


@dataclass
class DetectionNormalize:
    """Normalization by mean and deviation of each channel, after division by 255 if ``is_scale``."""

    mean: Sequence[float]
    std: Sequence[float]
    is_scale: bool = True

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        scaled = im.astype(np.float32) / np.float32(255 if self.is_scale else 1)
        return functional.normalize(scaled, self.mean, self.std), im_info


@dataclass
class DetectionResize:
    """Resize to (height, width); with ``keep_ratio`` proportionally within them."""

    target_size: int | Sequence[int]
    keep_ratio: bool = True
    interpolation: int = cv2.INTER_LINEAR

    def __post_init__(self) -> None:
        if isinstance(self.target_size, int):
            self.target_size = [self.target_size, self.target_size]

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        down, across = self.generate_scale(im)
        result = cv2.resize(im, None, None, fx=across, fy=down, interpolation=self.interpolation)
        if im_info is not None:
            im_info["im_shape"] = np.array(result.shape[:2], np.float32)
            im_info["scale_factor"] = np.array([down, across], np.float32)
        return result, im_info

    def generate_scale(self, im: NDArray[Any]) -> tuple[float, float]:
        """Return the scale of height and width."""
        height, width = im.shape[:2]
        first, second = np.asarray(self.target_size).tolist()
        if not self.keep_ratio:
            return first / height, second / width
        shortest, longest = min(first, second), max(first, second)
        ratio = shortest / min(height, width)
        if np.round(ratio * max(height, width)) > longest:
            ratio = longest / max(height, width)
        return ratio, ratio


@dataclass
class DetectionTranspose:
    """Axis permutation; a view."""

    transpose_target: Sequence[int]

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        return functional.transpose(im, self.transpose_target), im_info


@dataclass
class DetectionPadStride:
    """Zero padding of [channels, height, width] at bottom and right to multiples of ``stride``; FP32."""

    stride: int = 0

    def __call__(self, im: NDArray[Any], im_info: Info | None = None) -> _Pair:
        return padded(im, self.stride), im_info


# Colors


_BITS: Final = 8


def palette(classes: int) -> NDArray[np.uint8]:
    """Return colors [classes, 3]: every third bit of a class number forms a channel, the lowest bit the brightest."""
    numbers = np.arange(classes)
    colours = np.zeros((classes, 3), np.uint8)
    for step in range(_BITS):
        for channel in range(3):
            colours[:, channel] |= ((numbers >> (3 * step + channel) & 1) << (_BITS - 1 - step)).astype(np.uint8)
    return colours


# Object boxes


_COLUMNS: Final = 6
_MIN_DRAWN_SCORE: Final = 0.5
_WHITE: Final = (255, 255, 255)

Found = dict[str, Any]
"""``category_id``, ``bbox`` as left, top, width and height in pixels, and ``score``."""


class RCNNPostprocess:
    """Converter of rows of class, score, left, top, right and bottom to dictionaries, with drawing.

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
    """Yield the rows of the last output with six columns; none if the model returned its single number for no boxes."""
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


# Segmentation


_DEFAULT_SIDE: Final = 512


@dataclass
class SegPostprocess:
    """Writer of a class mask, and a color image of it in the size of the original, next to the image file.

    ``photo.jpg`` gets ``photo_jpg_mask.png`` and ``photo_jpg_result.png``.
    """

    class_num: int

    def __call__(self, image_with_result: Mapping[str, Any]) -> None:
        """Write both files.

        ``filename`` is the image; the last other value is the mask [height, width] or of 512 x 512 classes.

        Raises:
            ValueError: ``filename`` or the mask is missing, or the file is not an image.
        """
        masks = [value for key, value in image_with_result.items() if key != "filename" and ".lod" not in key]
        if "filename" not in image_with_result or not masks:
            raise ValueError(
                f"SegPostprocess needs filename and a mask, got {', '.join(image_with_result) or 'nothing'}"
            )
        file = Path(image_with_result["filename"])
        image: Any = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
        if image is None:
            raise ValueError(f"{file} is not an image that OpenCV can read")
        mask = np.squeeze(np.asarray(masks[-1])).astype(np.uint8)
        if mask.ndim != 2:  # noqa: PLR2004 - height and width
            mask = mask.reshape(_DEFAULT_SIDE, _DEFAULT_SIDE)
        colours = cv2.resize(palette(256)[mask], image.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        target = file.with_name(f"{file.stem}_{file.suffix.removeprefix('.')}")
        cv2.imwrite(f"{target}_mask.png", mask)
        cv2.imwrite(f"{target}_result.png", colours)


# Text boxes


_MAX_LINE_DISTANCE: Final = 10
"""Largest vertical distance in pixels of boxes in one line."""
_MIN_ROTATED_RATIO: Final = 1.5
"""Ratio of height to width from which a box is rotated."""


@dataclass
class FilterBoxes:
    """Filter of boxes wider than ``width`` and higher than ``height``, which are clipped."""

    width: int
    height: int

    def __call__(self, dt_boxes: Any, image_shape: Sequence[int]) -> NDArray[Any]:
        """Return FP32 [boxes, 4, 2], clockwise from the top left; empty if no box remains."""
        kept = [self.clip_det_res(self.order_points_clockwise(np.asarray(box)), *image_shape[:2]) for box in dt_boxes]
        return np.array([box for box in kept if self._is_large(box)])

    def _is_large(self, box: NDArray[Any]) -> bool:
        width, height = (int(np.linalg.norm(box[0] - box[corner])) for corner in (1, 3))
        return width > self.width and height > self.height

    def order_points_clockwise(self, pts: NDArray[Any]) -> NDArray[np.float32]:
        """Order four corners: top left, top right, bottom right, bottom left."""
        by_column = pts[np.argsort(pts[:, 0])]
        left, right = (half[np.argsort(half[:, 1])] for half in (by_column[:2], by_column[2:]))
        return np.array([left[0], right[0], right[1], left[1]], np.float32)

    def clip_det_res(self, points: NDArray[Any], img_height: int, img_width: int) -> NDArray[Any]:
        """Move corners to whole pixels of the image, in place."""
        points[:] = np.trunc(np.clip(points, 0, [img_width - 1, img_height - 1]))
        return points


@dataclass
class SortedBoxes:
    """Reading order of boxes: from the top, within a line from the left."""

    def __call__(self, dt_boxes: Any) -> list[Any]:
        boxes = sorted(dt_boxes, key=lambda box: (box[0][1], box[0][0]))
        for index, following in pairwise(range(len(boxes))):
            box, after = boxes[index], boxes[following]
            if abs(after[0][1] - box[0][1]) < _MAX_LINE_DISTANCE and after[0][0] < box[0][0]:
                boxes[index], boxes[following] = after, box
        return boxes


@dataclass
class GetRotateCropImage:
    """Crop of a straightened box; a box much higher than wide is rotated left by 90 degrees."""

    def __call__(self, img: NDArray[Any], points: NDArray[Any]) -> NDArray[Any]:
        """Return the content of a box [4, 2], clockwise from the top left, of an image [height, width, 3]."""
        left, top = np.trunc(points.min(0)).astype(int)
        right, bottom = np.trunc(points.max(0)).astype(int)
        box = (points - [left, top]).astype(np.float32)
        width, height = (int(np.linalg.norm(box[0] - box[corner])) for corner in (1, 3))
        target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
        matrix = cv2.getPerspectiveTransform(box, target)
        part = np.ascontiguousarray(img[top:bottom, left:right])
        straight = cv2.warpPerspective(part, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE)
        return np.rot90(straight) if height >= _MIN_ROTATED_RATIO * width else straight


# Polygon offsetting


_TOLERANCE: Final = 0.25
"""Largest distance in pixels between a round corner and its polygon."""
_FULL_CIRCLE: Final = 2 * np.pi


def grown(polygon: NDArray[Any], distance: float) -> NDArray[np.int32]:
    """Offset a convex polygon [corners, 2] in pixels outwards; [points, 2] with round corners.

    Corners are truncated to integers first and points rounded last, as in the original's library, with which models'
    thresholds were chosen.
    """
    corners = np.trunc(np.asarray(polygon, np.float64))
    corners = corners[np.any(corners != np.roll(corners, 1, 0), 1)]
    edges = np.roll(corners, -1, 0) - corners
    if np.sum(corners[:, 0] * edges[:, 1] - corners[:, 1] * edges[:, 0]) < 0:
        corners = corners[::-1]
        edges = np.roll(corners, -1, 0) - corners
    outwards = np.arctan2(-edges[:, 0], edges[:, 1])
    step = _angle_step(distance)
    points = [
        corner + distance * np.array([np.cos(angle), np.sin(angle)])
        for corner, start, end in zip(corners, np.roll(outwards, 1), outwards, strict=True)
        for angle in (*(start + step * np.arange(max(1, round((end - start) % _FULL_CIRCLE / step)))), end)
    ]
    return np.rint(points).astype(np.int32)


def _angle_step(distance: float) -> float:
    """Return the angle between two points of a round corner."""
    tolerance = min(_TOLERANCE, _TOLERANCE * distance)
    return float(max(2 * np.arccos(1 - tolerance / distance), 2 / distance))


# Text regions


_MIN_GROWTH: Final = 2


class DBPostProcess:
    """Finder of text rectangles by differentiable binarization.

    Args:
        params: ``thresh``, minimum of a text pixel; ``box_thresh``, minimum mean of a region; ``max_candidates``, most
            regions; ``unclip_ratio``, growth of regions.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.thresh: float = params["thresh"]
        self.box_thresh: float = params["box_thresh"]
        self.max_candidates: int = params["max_candidates"]
        self.unclip_ratio: float = params["unclip_ratio"]
        self.min_size = 3

    def __call__(self, pred: NDArray[Any], ratio_list: Sequence[Sequence[float]]) -> list[Any]:
        """Return INT16 [rectangles, 4, 2] for each map, clockwise from the top left, or an empty list.

        Args:
            pred: maps [batch, 1, height, width].
            ratio_list: scale of height and width of each image.
        """
        rectangles: list[Any] = []
        for probabilities, (down, across) in zip(pred[:, 0], ratio_list, strict=False):
            height, width = probabilities.shape
            boxes, scores = self.boxes_from_bitmap(probabilities, probabilities > self.thresh, width, height)
            kept = boxes[scores > self.box_thresh]
            rectangles.append((kept / np.array([across, down])).astype(np.int16) if len(kept) else [])
        return rectangles

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def boxes_from_bitmap(
        self, pred: NDArray[Any], _bitmap: NDArray[Any], dest_width: int, dest_height: int
    ) -> tuple[NDArray[np.int16], NDArray[np.float32]]:  # fmt: skip
        """Return rectangle and score of each region; zeros for regions that are too small or below the threshold."""
        contours, _ = cv2.findContours(_bitmap.astype(np.uint8) * 255, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
        contours = contours[: self.max_candidates]
        boxes, scores = np.zeros((len(contours), 4, 2), np.int16), np.zeros(len(contours), np.float32)
        target = np.array([dest_width, dest_height])
        for index, contour in enumerate(contours):
            box, score = self._region(pred, contour)
            if box is not None:
                boxes[index] = np.clip(np.round(box / _bitmap.shape[1::-1] * target), 0, target)
                scores[index] = score
        return boxes, scores

    def _region(self, pred: NDArray[Any], contour: Any) -> tuple[NDArray[Any] | None, float]:
        corners, side = self.get_mini_boxes(contour)
        if side < self.min_size:
            return None, 0
        score = self.box_score_fast(pred, np.array(corners))
        if score < self.box_thresh:
            return None, 0
        corners, side = self.get_mini_boxes(self.unclip(np.array(corners)).reshape(-1, 1, 2))
        return (None, 0) if side < self.min_size + _MIN_GROWTH else (np.array(corners), score)

    def unclip(self, box: NDArray[Any]) -> NDArray[np.int32]:
        """Grow a convex polygon [corners, 2] by area times ``unclip_ratio`` over perimeter; [1, points, 2]."""
        outline = np.asarray(box, np.float32).reshape(-1, 1, 2)
        distance = cv2.contourArea(outline) * self.unclip_ratio / cv2.arcLength(outline, closed=True)
        return grown(box, distance)[np.newaxis]

    def get_mini_boxes(self, contour: Any) -> tuple[list[NDArray[Any]], float]:
        """Return the smallest rectangle around points, clockwise from the top left, and its shorter side."""
        rectangle = cv2.minAreaRect(contour)
        corners = np.asarray(cv2.boxPoints(rectangle))
        first, second, third, fourth = corners[np.argsort(corners[:, 0], kind="stable")]
        top_left, bottom_left = _upper_first(first, second)
        top_right, bottom_right = _upper_first(third, fourth)
        return [top_left, top_right, bottom_right, bottom_left], min(rectangle[1])

    def box_score_fast(self, bitmap: NDArray[Any], _box: NDArray[Any]) -> float:
        """Return the mean of the map within a polygon [corners, 2]."""
        last = np.array(bitmap.shape[1::-1]) - 1
        start = np.clip(np.floor(_box.min(0)).astype(np.int32), 0, last)
        end = np.clip(np.ceil(_box.max(0)).astype(np.int32), 0, last)
        width, height = end - start + 1
        mask = np.zeros((height, width), np.uint8)
        cv2.fillPoly(mask, [(_box - start).reshape(-1, 2).astype(np.int32)], (1,))
        return float(cv2.mean(bitmap[start[1] : end[1] + 1, start[0] : end[0] + 1], mask)[0])


def _upper_first(one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return (one, other) if other[1] > one[1] else (other, one)


# Image classification


def generate_colormap(num_classes: int) -> list[list[int]]:
    """Return an RGB color for each class."""
    colours: list[list[int]] = palette(num_classes).tolist()
    return colours


@dataclass
class ImageReader:
    """Preprocessor to a classifier's input [3, side, side] from the bytes of an image file.

    Resizes the shorter side to ``resize_short_size``, crops a square of ``image_shape[1]`` and normalizes RGB.
    With ``image_shape[1]`` 0 the image keeps its size.
    """

    image_shape: Sequence[int] = (3, 224, 224)
    image_mean: Sequence[float] = (0.485, 0.456, 0.406)
    image_std: Sequence[float] = (0.229, 0.224, 0.225)
    resize_short_size: int = 256
    interpolation: int | None = None
    crop_center: bool = True

    def process_image(self, sample: bytes) -> NDArray[np.float32] | None:
        """Return the FP32 input, or None if the bytes are not an image."""
        image: NDArray[Any] | None = decoded(sample)
        if image is None:
            return None
        side = self.image_shape[1]
        if side > 0:
            image = functional.resize(image, self.resize_short_size, interpolation=self.interpolation)
            image = functional.crop(image, side, self.crop_center)
        rgb = image[:, :, ::-1].transpose(2, 0, 1).astype(np.float32) / 255
        return functional.normalize(rgb, self.image_mean, self.image_std, channel_first=True)
