"""A video's frames, and which of them are looked at."""

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

_DENSE: Final = 64
_DENSE_CLIPS: Final = 10


@dataclass
class VideoDecoder:
    """Reads the video ``filename``, blocking: ``frames`` as RGB, and ``frames_len``.

    Args:
        backend: ``cv2``; the original's others need packages that are not taken here.
        mode: this and what follows is of other backends, and not used.

    Raises:
        NotImplementedError: another backend is asked for.
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
    """Chooses frames of a video, or image files of a folder (``format`` is ``frame``): ``imgs``, as Pillow's images.

    Args:
        num_seg: into how many parts the video is cut.
        seg_len: how many frames follow each other in a part.
        frame_interval: how far apart those are; parts overlap then if need be.
        valid_mode: take the middle of each part, and not any place.
        select_left: take the left of two middles.
        dense_sample: take parts out of 64 frames, from ten places in ``valid_mode``.
        linspace_sample: take frames at equal distances, from ``start_idx`` to ``end_idx`` if they are known.
        use_pil: taken, and not used.
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
            places = self._places(count, results)
            chosen = [place % count for place in places] if is_video else [place + 1 for place in places]
        results["imgs"] = [_image(results, place) for place in chosen]
        return results

    def _places(self, count: int, results: Results) -> list[int]:
        if self.frame_interval is not None:
            starts = self._starts_of_clips(count, self.seg_len * self.frame_interval)
            return [(start + step * self.frame_interval) % count for start in starts for step in range(self.seg_len)]
        if self.linspace_sample:
            is_part = "start_idx" in results and "end_idx" in results
            first, last = (results["start_idx"], results["end_idx"]) if is_part else (0, count - 1)
            return [int(place) for place in np.clip(np.linspace(first, last, self.num_seg), 0, count - 1)]
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
        within = ((length - 1) // 2 if self.valid_mode else _any(spare + 1) for _ in range(self.num_seg))
        return [part * length + place for part, place in enumerate(within)]

    def _left_of_middles(self, count: int) -> list[int]:
        parts = range(self.num_seg)
        if self.valid_mode:
            length = count / self.num_seg
            return [int(length / 2 + length * part) for part in parts] if length > 1 else [0] * self.num_seg
        whole = count // self.num_seg
        return [part * whole + _any(whole) for part in parts] if whole else [0] * self.num_seg

    def _starts_of_clips(self, count: int, length: int) -> list[int]:
        room, parts = count - length + 1, range(self.num_seg)
        if self.valid_mode:
            step = room / self.num_seg
            return [int(part * step + step / 2) for part in parts] if room > 0 else [0] * self.num_seg
        step = room // self.num_seg
        if step > 0:
            return [part * step + _any(step) for part in parts]
        if count > max(self.num_seg, length):
            return sorted(_any(room) for _ in parts)
        return [round(part * room / self.num_seg) for part in parts] if step == 0 else [0] * self.num_seg

    def _dense(self, count: int) -> list[int]:
        last = max(0, count - _DENSE)
        if self.valid_mode:
            starts = np.linspace(0, last, _DENSE_CLIPS, dtype=int).tolist()
        else:
            starts = [_any(last) if last else 0]
        step = _DENSE // self.num_seg
        return [(part * step + start) % count + 1 for start in starts for part in range(self.num_seg)]


def _any(end: int) -> int:
    """Give any number below an end."""
    return random.randrange(end)  # noqa: S311 - nothing secret


def _image(results: Results, place: int) -> Any:
    if results["format"] == "video":
        return Image.fromarray(np.ascontiguousarray(results["frames"][place]))
    with Image.open(Path(results["frame_dir"]) / results["suffix"].format(place)) as file:
        return file.convert("RGB")
