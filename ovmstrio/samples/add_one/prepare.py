"""Preparation of the sample add_one: builds the model in code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.conversion import save

__all__ = ["ENTRIES", "build"]


def build() -> ov.Model:
    """Build the model: ``x`` FP32 [-1,10] -> ``y`` FP32 [-1,10]."""
    x = op.parameter(ov.PartialShape([-1, 10]), np.float32, name="x")
    x.output(0).set_names({"x"})
    y = op.add(x, np.float32(1))
    y.output(0).set_names({"y"})
    return ov.Model([op.result(y)], [x], "add_one")


def write(_files: Path, directory: Path) -> None:
    """Write the version directory."""
    save(build(), directory)


ENTRIES = {"add_one": write}
