"""Generated models for benchmarks: an addition, and a network of ResNet-50's shape with random weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import openvino.opset13 as op

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["F32", "RESNET_SETTINGS", "resnet50", "trivial", "write_repository"]

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
RESNET_SETTINGS = {**F32, "PERFORMANCE_HINT": "THROUGHPUT"}

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


def trivial() -> ov.Model:
    """FP32 ``b`` [1,10] plus one is ``a``."""
    b = op.parameter([1, 10], np.float32, name="b")
    b.output(0).set_names({"b"})
    a = op.add(b, np.float32(1))
    a.output(0).set_names({"a"})
    return ov.Model([op.result(a)], [b], "trivial")


class _Layers:
    """Convolutions with random weights, scaled so that values stay finite through fifty of them."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def conv(self, x: Any, channels_in: int, channels_out: int, size: int, stride: int, *, relu: bool = True) -> Any:
        shape = (channels_out, channels_in, size, size)
        scale = np.sqrt(2 / (channels_in * size * size))
        weights = (self._random.standard_normal(shape) * scale).astype(np.float32)
        pad = [size // 2] * 2
        y = op.convolution(x, weights, [stride, stride], pad, pad, [1, 1])
        y = op.add(y, np.zeros((1, channels_out, 1, 1), np.float32))
        return op.relu(y) if relu else y

    def bottleneck(self, x: Any, channels_in: int, width: int, stride: int) -> Any:
        y = self.conv(x, channels_in, width, 1, 1)
        y = self.conv(y, width, width, 3, stride)
        y = self.conv(y, width, 4 * width, 1, 1, relu=False)
        if stride != 1 or channels_in != 4 * width:
            x = self.conv(x, channels_in, 4 * width, 1, stride, relu=False)
        return op.relu(op.add(op.multiply(y, np.float32(0.2)), x))


def resnet50(pixels: int = 224) -> ov.Model:
    """FP32 ``image`` [1,3,pixels,pixels] to ``scores`` [1,1000] through ResNet-50's layers."""
    layers = _Layers()
    image = op.parameter([1, 3, pixels, pixels], np.float32, name="image")
    image.output(0).set_names({"image"})
    x = layers.conv(image, 3, 64, 7, 2)
    x = op.max_pool(x, [2, 2], [1, 1], [1, 1], [1, 1], [3, 3]).output(0)
    channels = 64
    for width, blocks, first_stride in _STAGES:
        for block in range(blocks):
            x = layers.bottleneck(x, channels, width, first_stride if block == 0 else 1)
            channels = 4 * width
    x = op.reduce_mean(x, np.array([2, 3]), keep_dims=False)
    weights = np.random.default_rng(1).standard_normal((1000, 2048)).astype(np.float32) / 64
    scores = op.matmul(x, weights, transpose_a=False, transpose_b=True)
    scores.output(0).set_names({"scores"})
    return ov.Model([op.result(scores)], [image], "resnet50")


def write_repository(
    root: Path, models: dict[str, ov.Model], settings: dict[str, dict[str, str]], *, nireq: int = 0
) -> Path:
    """Save models as version 1 each under ``root`` and return the path of their ``config.json``."""
    entries = []
    for name, model in models.items():
        target = root / name / "1" / "model.xml"
        target.parent.mkdir(parents=True, exist_ok=True)
        ov.save_model(model, target, compress_to_fp16=False)
        entries.append(
            {
                "config": {
                    "name": name,
                    "base_path": str(root / name),
                    "plugin_config": settings.get(name, F32),
                    "nireq": nireq,
                }
            }
        )
    root.mkdir(exist_ok=True)
    config = root / "config.json"
    config.write_text(json.dumps({"model_config_list": entries}))
    return config
