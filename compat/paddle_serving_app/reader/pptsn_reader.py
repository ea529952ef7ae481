"""Video transforms under the original's module name."""

from __future__ import annotations

from paddle_serving_app.reader.video_frames import Sampler, VideoDecoder
from paddle_serving_app.reader.video_images import Image2Array, Normalization, Scale, TenCrop

__all__ = ["Image2Array", "Normalization", "Sampler", "Scale", "TenCrop", "VideoDecoder"]
