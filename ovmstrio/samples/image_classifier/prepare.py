"""Preparation of the sample image_classifier: builds EfficientNet-lite0 with preprocessing from PyTorch weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op
from openvino.preprocess import ColorFormat, PrePostProcessor, ResizeAlgorithm

from ovmstrio import Array
from ovmstrio.conversion import save
from ovmstrio.samples.image_classifier import torch_file

__all__ = ["ENTRIES", "build"]

_STAGES: Final = ((1, 1, 1), (2, 2, 6), (2, 2, 6), (3, 2, 6), (3, 1, 6), (4, 2, 6), (1, 1, 6))
"""Repetitions of each block, stride of the first repetition, and expansion factor."""
_EPSILON: Final = 1e-3
_MEAN: Final = 127.0
_SCALE: Final = 128.0


@dataclass(frozen=True, slots=True)
class _Network:
    """Layers of EfficientNet-lite0."""

    weights: Mapping[str, Array]

    def convolution(
        self, x: ov.Node, name: str, norm: str, *, stride: int = 1, depthwise: bool = False, activate: bool = True
    ) -> ov.Node:
        """Add a convolution, with the following batch normalisation folded into weights and bias."""
        scale = self.weights[f"{norm}.weight"] / np.sqrt(self.weights[f"{norm}.running_var"] + _EPSILON)
        bias = self.weights[f"{norm}.bias"] - self.weights[f"{norm}.running_mean"] * scale
        kernel = (self.weights[f"{name}.weight"] * scale[:, None, None, None]).astype(np.float32)
        geometry = {"strides": [stride] * 2, "pads_begin": [0] * 2, "pads_end": [0] * 2, "dilations": [1] * 2}
        if depthwise:
            y = op.group_convolution(x, kernel[:, None], **geometry, auto_pad="same_upper")
        else:
            y = op.convolution(x, kernel, **geometry, auto_pad="same_upper")
        y = op.add(y, bias.astype(np.float32)[None, :, None, None])
        return op.clamp(y, 0.0, 6.0) if activate else y

    def block(self, x: ov.Node, prefix: str, stride: int, expand: int, *, residual: bool) -> ov.Node:
        """Add an expansion, a depthwise convolution and a projection; with ``residual``, add the input."""
        y = self.convolution(x, f"{prefix}_expand_conv", f"{prefix}_bn0") if expand > 1 else x
        y = self.convolution(y, f"{prefix}_depthwise_conv", f"{prefix}_bn1", stride=stride, depthwise=True)
        y = self.convolution(y, f"{prefix}_project_conv", f"{prefix}_bn2", activate=False)
        return op.add(y, x) if residual else y

    def classify(self, x: ov.Node) -> ov.Node:
        """Add global average pooling and the classifier."""
        x = op.reduce_mean(x, np.array([2, 3]), keep_dims=False)
        scores = op.matmul(x, self.weights["_fc.weight"], transpose_a=False, transpose_b=True)
        return op.softmax(op.add(scores, self.weights["_fc.bias"]), 1)


def _network(weights: Mapping[str, Array]) -> ov.Model:
    network = _Network(weights)
    images = op.parameter(ov.PartialShape([-1, 3, 224, 224]), np.float32, name="images")
    images.output(0).set_names({"images"})
    x = network.convolution(images, "_conv_stem", "_bn0", stride=2)
    number = 0
    for repeats, first_stride, expand in _STAGES:
        for repetition in range(repeats):
            stride = first_stride if repetition == 0 else 1
            x = network.block(x, f"_blocks.{number}.", stride, expand, residual=repetition > 0)
            number += 1
    probabilities = network.classify(network.convolution(x, "_conv_head", "_bn1"))
    probabilities.output(0).set_names({"probabilities"})
    return ov.Model([op.result(probabilities)], [images], "efficientnet-lite0")


def build(weights: Mapping[str, Array]) -> ov.Model:
    """Build the model: ``images`` UINT8 [-1,-1,-1,3], RGB of any size -> ``probabilities`` FP32 [-1,1000]."""
    processor = PrePostProcessor(_network(weights))
    images = processor.input()
    images.tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NHWC")).set_spatial_dynamic_shape()
    images.tensor().set_color_format(ColorFormat.RGB)
    steps = images.preprocess().convert_element_type(ov.Type.f32).resize(ResizeAlgorithm.RESIZE_BILINEAR_PILLOW)
    steps.mean([_MEAN] * 3).scale([_SCALE] * 3)
    images.model().set_layout(ov.Layout("NCHW"))
    return processor.build()


def write(files: Path, directory: Path) -> None:
    """Write the version directory, with FP16 weights."""
    save(build(torch_file.read(files / "efficientnet-lite0-57934424.pth")), directory, fp16=True)


ENTRIES = {"image_classifier": write}
