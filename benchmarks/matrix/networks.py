"""Models of the matrix's sizes: an addition, perceptrons, convolutions, and ResNet-50's layers on images."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from benchmarks.models import resnet50, trivial

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.tensor import Array

__all__ = ["input_of", "network"]

_WIDTHS_OF_100_US: Final = (512, 640, 512, 256)
_WIDTHS_OF_1_MS: Final = (1024, 2048, 1536, 384)
_PIXELS_OF_10_MS: Final = 64


def _perceptron(widths: tuple[int, ...]) -> ov.Model:
    """FP32 ``x`` [1,w0] to ``y`` [1,wn], with a ReLU after each layer."""
    random = np.random.default_rng(0)
    x = op.parameter([1, widths[0]], np.float32, name="x")
    x.output(0).set_names({"x"})
    y = x
    for wide, narrow in pairwise(widths):
        weights = (random.standard_normal((wide, narrow)) * np.sqrt(2 / wide)).astype(np.float32)
        y = op.relu(op.matmul(y, weights, False, False))
    y.output(0).set_names({"y"})
    return ov.Model([op.result(y)], [x], "perceptron")


def _convolutions(channels: int, pixels: int, layers: int) -> ov.Model:
    """FP32 ``x`` [1,3,pixels,pixels] to ``y`` [1,10]: convolutions of 3 by 3 each followed by a ReLU, and a mean."""
    random = np.random.default_rng(0)
    x = op.parameter([1, 3, pixels, pixels], np.float32, name="x")
    x.output(0).set_names({"x"})
    y, given = x, 3
    for _ in range(layers):
        weights = random.standard_normal((channels, given, 3, 3)) * np.sqrt(2 / (9 * given))
        y, given = op.relu(op.convolution(y, weights.astype(np.float32), [1, 1], [1, 1], [1, 1], [1, 1])), channels
    scores = random.standard_normal((channels, 10)).astype(np.float32)
    y = op.matmul(op.reduce_mean(y, np.array([2, 3])), scores, False, False)
    y.output(0).set_names({"y"})
    return ov.Model([op.result(y)], [x], "convolutions")


_NETWORKS: Final[dict[str, Callable[[], ov.Model]]] = {
    "10 us": trivial,
    "100 us": lambda: _perceptron(_WIDTHS_OF_100_US),
    "1 ms": lambda: _perceptron(_WIDTHS_OF_1_MS),
    "60 us of convolutions": lambda: _convolutions(16, 24, 2),
    "150 us of convolutions": lambda: _convolutions(16, 32, 3),
    "450 us of convolutions": lambda: _convolutions(32, 32, 3),
    "10 ms": lambda: resnet50(_PIXELS_OF_10_MS),
    "75 ms": resnet50,
}


def network(size: str, *, is_dynamic: bool) -> ov.Model:
    """Build the model of a size, with batch 1 or an open batch."""
    model = _NETWORKS[size]()
    if is_dynamic:
        (given,) = model.inputs
        model.reshape({given: [-1, *list(given.partial_shape)[1:]]})
    return model


def input_of(model: ov.Model) -> tuple[str, Array]:
    """Return the name of the only input, and its value in every request."""
    (given,) = model.inputs
    shape = [1, *(size.get_length() for size in list(given.partial_shape)[1:])]
    return given.any_name, np.random.default_rng(0).random(shape, np.float32)
