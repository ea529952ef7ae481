"""Preparation of the sample ensemble: builds two classifiers and copies the node that combines their votes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.conversion import save
from ovmstrio.samples.copying import copy_files
from ovmstrio.samples.iris.prepare import build as build_regression

__all__ = ["ENTRIES", "build_bayes"]

_MEANS: Final = np.array(
    [[5.006, 3.428, 1.462, 0.246], [5.936, 2.77, 4.26, 1.326], [6.588, 2.974, 5.552, 2.026]], np.float32
)
"""Mean of each feature (cm) in each species of Fisher's data set."""
_VARIANCES: Final = np.array(
    [[0.1218, 0.1408, 0.0296, 0.0109], [0.2611, 0.0965, 0.2164, 0.0383], [0.3963, 0.1019, 0.2985, 0.0739]], np.float32
)


def build_bayes() -> ov.Model:
    """Build a naive Bayes classifier: ``features`` FP32 [-1,4] -> ``probabilities`` FP32 [-1,3]."""
    features = op.parameter(ov.PartialShape([-1, 4]), np.float32, name="features")
    features.output(0).set_names({"features"})
    away = op.subtract(op.unsqueeze(features, np.array([1])), _MEANS[np.newaxis])
    squares = op.divide(op.multiply(away, away), _VARIANCES[np.newaxis])
    surprise = op.reduce_sum(op.add(squares, np.log(_VARIANCES)[np.newaxis]), np.array([2]))
    probabilities = op.softmax(op.multiply(surprise, np.float32(-0.5)), 1)
    probabilities.output(0).set_names({"probabilities"})
    return ov.Model([op.result(probabilities)], [features], "naive_bayes")


def write_regression(_files: Path, directory: Path) -> None:
    """Write the version directory of the first classifier."""
    save(build_regression(), directory)


def write_bayes(_files: Path, directory: Path) -> None:
    """Write the version directory of the second classifier."""
    save(build_bayes(), directory)


ENTRIES = {
    "ensemble_regression": write_regression,
    "ensemble_bayes": write_bayes,
    "ensemble": copy_files(__file__, "vote.py"),
}
