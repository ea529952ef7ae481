"""Preparation of the sample iris: builds the classifier from the coefficients of a logistic regression."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.conversion import save

__all__ = ["ENTRIES", "build", "coefficients"]


@cache
def coefficients() -> dict[str, Any]:
    """Load the coefficients: ``classes``, ``features``, ``weights`` [3,4], ``intercepts`` [3]."""
    fitted: dict[str, Any] = json.loads(Path(__file__).with_name("coefficients.json").read_text(encoding="utf-8"))
    return fitted


def build() -> ov.Model:
    """Build the model: ``features`` FP32 [-1,4] -> ``probabilities`` FP32 [-1,3], ``label`` INT64 [-1]."""
    fitted = coefficients()
    weights = np.array(fitted["weights"], np.float32)
    features = op.parameter(ov.PartialShape([-1, weights.shape[1]]), np.float32, name="features")
    features.output(0).set_names({"features"})
    products = op.matmul(features, weights, transpose_a=False, transpose_b=True)
    scores = op.add(products, np.array(fitted["intercepts"], np.float32))
    probabilities = op.softmax(scores, 1)
    probabilities.output(0).set_names({"probabilities"})
    best = op.topk(probabilities, np.int64(1), 1, "max", "value", index_element_type="i64")
    label = op.squeeze(best.output(1), np.array([1]))
    label.output(0).set_names({"label"})
    model = ov.Model([op.result(probabilities), op.result(label)], [features], "iris")
    model.set_rt_info(" ".join(fitted["classes"]), ["model_info", "labels"])
    return model


def write(_files: Path, directory: Path) -> None:
    """Write the version directory."""
    save(build(), directory)


ENTRIES = {"iris": write}
