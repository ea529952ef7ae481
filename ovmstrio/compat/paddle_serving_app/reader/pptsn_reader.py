"""Video decoding, frame sampling and transforms.

Transforms take a dictionary, replace its ``imgs`` and return it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from paddle_serving_app.reader.opencv import cv2

__all__ = ["Image2Array", "Normalization", "Results", "Sampler", "Scale", "TenCrop", "VideoDecoder"]

# Transforms


Results = dict[str, Any]
"""Video data: ``filename``, ``format``, ``backend``, ``frames``, ``frames_len`` and ``imgs``."""


@dataclass
class Scale:
    """Resize of the shorter side to ``short_size``, the other side to 4/3 of it, proportionally, or to the same length.

    Args:
        short_size: pixels.
        fixed_ratio: resize to a ratio of 4 to 3.
        keep_ratio: keep the image's ratio; excludes ``fixed_ratio``.
        do_round: round the longer side instead of truncating it.
        backend: ``pillow`` or ``cv2``.

    Raises:
        ValueError: both ratios are set, or the backend is unknown.
    """

    short_size: int
    fixed_ratio: bool = True
    keep_ratio: bool | None = None
    do_round: bool = False
    backend: str = "pillow"

    def __post_init__(self) -> None:
        if self.fixed_ratio and self.keep_ratio:
            raise ValueError("fixed_ratio and keep_ratio cannot be true together")
        if self.backend not in {"pillow", "cv2"}:
            raise ValueError(f"backend must be pillow or cv2, got {self.backend!r}")

    def __call__(self, results: Results) -> Results:
        results["imgs"] = [self._resize(img) for img in results["imgs"]]
        return results

    def _resize(self, img: Any) -> Any:
        width, height = (img.shape[1], img.shape[0]) if isinstance(img, np.ndarray) else img.size
        longer = self._longer_side(max(width, height) / min(width, height))
        size = (self.short_size, longer) if width <= height else (longer, self.short_size)
        if self.backend == "pillow":
            return img.resize(size, Image.Resampling.BILINEAR)
        resized = cv2.resize(np.asarray(img), size, interpolation=cv2.INTER_LINEAR)
        return resized if self.keep_ratio is not None else Image.fromarray(resized)

    def _longer_side(self, ratio: float) -> int:
        if self.fixed_ratio:
            return int(self.short_size * 4 / 3)
        if not self.keep_ratio:
            return self.short_size
        return int(self.short_size * ratio + (0.5 if self.do_round else 0))


@dataclass
class TenCrop:
    """Square crops of the four corners and the center of Pillow images, each followed by its mirror image."""

    target_size: int

    def __call__(self, results: Results) -> Results:
        images, side = results["imgs"], self.target_size
        across, down = ((length - side) // 4 for length in images[0].size)
        crops: list[Any] = []
        for column, row in ((0, 0), (4, 0), (0, 4), (4, 4), (2, 2)):
            left, top = column * across, row * down
            cut = [image.crop((left, top, left + side, top + side)) for image in images]
            crops += [*cut, *(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in cut)]
        results["imgs"] = crops
        return results


@dataclass
class Image2Array:
    """Stack of images to FP32 [time, channels, height, width] or channels first; without ``transpose`` axes are kept.

    Raises:
        ValueError: ``data_format`` is neither ``tchw`` nor ``cthw``.
    """

    transpose: bool = True
    data_format: str = "tchw"

    def __post_init__(self) -> None:
        if self.data_format not in {"tchw", "cthw"}:
            raise ValueError(f"data_format must be tchw or cthw, got {self.data_format!r}")

    def __call__(self, results: Results) -> Results:
        images = np.stack([np.asarray(image) for image in results["imgs"]]).astype(np.float32)
        if self.transpose:
            images = images.transpose((0, 3, 1, 2) if self.data_format == "tchw" else (3, 0, 1, 2))
        results["imgs"] = images
        return results


class Normalization:
    """Normalization by mean and deviation, after division by 255 unless ``inplace``.

    Args:
        mean: mean of each channel.
        std: deviation of each channel.
        tensor_shape: shape of mean and deviation for broadcasting.
        inplace: images are a list [height, width, channels], with mean and deviation of 0 to 255.

    Raises:
        TypeError: mean or deviation is not a list.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        tensor_shape: Sequence[int] = (3, 1, 1),
        inplace: bool = False,
    ) -> None:
        for name, value in (("mean", mean), ("std", std)):
            if not isinstance(value, Sequence):
                raise TypeError(f"{name} must be a list or a tuple, got {type(value).__name__}")
        self.inplace = inplace
        shape = (-1,) if inplace else tuple(tensor_shape)
        self.mean = np.array(mean, np.float32).reshape(shape)
        self.std = np.array(std, np.float32).reshape(shape)

    def __call__(self, results: Results) -> Results:
        images = np.asarray(results["imgs"], np.float32)
        results["imgs"] = ((images if self.inplace else images / np.float32(255)) - self.mean) / self.std
        return results


# Decoding and sampling


_DENSE_FRAMES: Final = 64
_DENSE_CLIPS: Final = 10


@dataclass
class VideoDecoder:
    """Decoder of the video ``filename`` to RGB ``frames`` and ``frames_len``; blocking.

    Args:
        backend: only ``cv2``.
        mode: ignored, as all following arguments; the original uses them for other backends.

    Raises:
        NotImplementedError: the backend is not ``cv2``.
    """

    backend: str = "cv2"
    mode: str = "train"
    sampling_rate: int = 32
    num_seg: int = 8
    num_clips: int = 1
    target_fps: int = 30

    def __post_init__(self) -> None:
        if self.backend != "cv2":
            raise NotImplementedError(f"VideoDecoder reads with the backend cv2, got {self.backend!r}")

    def __call__(self, results: Results) -> Results:
        video = cv2.VideoCapture(results["filename"])
        try:
            read = (video.read() for _ in range(int(video.get(cv2.CAP_PROP_FRAME_COUNT))))
            frames = [frame[:, :, ::-1] for is_there, frame in read if is_there]
        finally:
            video.release()
        results.update(format="video", backend=self.backend, frames=frames, frames_len=len(frames))
        return results


@dataclass
class Sampler:
    """Sampler of frames of a video, or image files of a folder (``format`` ``frame``), as Pillow images ``imgs``.

    Args:
        num_seg: number of segments.
        seg_len: consecutive frames per segment.
        frame_interval: distance of these frames; segments may overlap.
        valid_mode: take the middle of each segment instead of a random index.
        select_left: take the left of two middles.
        dense_sample: sample segments from 64 frames, from ten indices in ``valid_mode``.
        linspace_sample: sample at equal distances, between ``start_idx`` and ``end_idx`` if given.
        use_pil: ignored.
    """

    num_seg: int
    seg_len: int
    frame_interval: int | None = None
    valid_mode: bool = False
    select_left: bool = False
    dense_sample: bool = False
    linspace_sample: bool = False
    use_pil: bool = True

    def __call__(self, results: Results) -> Results:
        count = int(results["frames_len"])
        if results["format"] not in {"video", "frame"}:
            raise NotImplementedError(f"Sampler knows the formats video and frame, got {results['format']!r}")
        is_video = results["format"] == "video"
        if self.dense_sample and not self.select_left and self.frame_interval is None and not self.linspace_sample:
            chosen = self._dense(count)
        else:
            indices = self._places(count, results)
            chosen = [index % count for index in indices] if is_video else [index + 1 for index in indices]
        results["imgs"] = [_image(results, index) for index in chosen]
        return results

    def _places(self, count: int, results: Results) -> list[int]:
        if self.frame_interval is not None:
            starts = self._starts_of_clips(count, self.seg_len * self.frame_interval)
            return [(start + step * self.frame_interval) % count for start in starts for step in range(self.seg_len)]
        if self.linspace_sample:
            is_part = "start_idx" in results and "end_idx" in results
            first, last = (results["start_idx"], results["end_idx"]) if is_part else (0, count - 1)
            return [int(index) for index in np.clip(np.linspace(first, last, self.num_seg), 0, count - 1)]
        if self.select_left:
            return self._left_of_middles(count)
        starts = self._starts_of_parts(count)
        return [start + step for start in starts for step in range(self.seg_len)]

    def _starts_of_parts(self, count: int) -> list[int]:
        length = count // self.num_seg
        spare = length - self.seg_len
        if length < 1:
            return list(range(self.num_seg))
        if spare < 0:
            return [part * length for part in range(self.num_seg)]
        within = ((length - 1) // 2 if self.valid_mode else _random_below(spare + 1) for _ in range(self.num_seg))
        return [part * length + index for part, index in enumerate(within)]

    def _left_of_middles(self, count: int) -> list[int]:
        parts = range(self.num_seg)
        if self.valid_mode:
            length = count / self.num_seg
            return [int(length / 2 + length * part) for part in parts] if length > 1 else [0] * self.num_seg
        length = count // self.num_seg
        return [part * length + _random_below(length) for part in parts] if length else [0] * self.num_seg

    def _starts_of_clips(self, count: int, length: int) -> list[int]:
        room, parts = count - length + 1, range(self.num_seg)
        if self.valid_mode:
            step = room / self.num_seg
            return [int(part * step + step / 2) for part in parts] if room > 0 else [0] * self.num_seg
        step = room // self.num_seg
        if step > 0:
            return [part * step + _random_below(step) for part in parts]
        if count > max(self.num_seg, length):
            return sorted(_random_below(room) for _ in parts)
        return [round(part * room / self.num_seg) for part in parts] if step == 0 else [0] * self.num_seg

    def _dense(self, count: int) -> list[int]:
        last = max(0, count - _DENSE_FRAMES)
        if self.valid_mode:
            starts = np.linspace(0, last, _DENSE_CLIPS, dtype=int).tolist()
        else:
            starts = [_random_below(last) if last else 0]
        step = _DENSE_FRAMES // self.num_seg
        return [(part * step + start) % count + 1 for start in starts for part in range(self.num_seg)]


def _random_below(end: int) -> int:
    return random.randrange(end)  # noqa: S311 - not a secret


def _image(results: Results, index: int) -> Any:
    if results["format"] == "video":
        return Image.fromarray(np.ascontiguousarray(results["frames"][index]))
    with Image.open(Path(results["frame_dir"]) / results["suffix"].format(index)) as file:
        return file.convert("RGB")
