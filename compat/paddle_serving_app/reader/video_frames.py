"""Video decoding and frame sampling."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from paddle_serving_app.reader.opencv import cv2
from paddle_serving_app.reader.video_images import Results

__all__ = ["Sampler", "VideoDecoder"]

_DENSE_FRAMES: Final = 64
_DENSE_CLIPS: Final = 10


@dataclass
class VideoDecoder:
    """Reads the video ``filename`` into RGB ``frames`` and ``frames_len``; blocking.

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
    """Samples frames of a video, or image files of a folder (``format`` ``frame``), as Pillow images ``imgs``.

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
