"""Python node that converts probabilities to the label of the likeliest class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pyovms import Tensor


class OvmsPythonModel:
    """Node with the labels of ImageNet's classes from ``labels.txt``."""

    def initialize(self, kwargs: dict[str, Any]) -> None:
        """Load the labels once, for all requests."""
        path = Path(kwargs["base_path"]) / "labels.txt"
        self.labels = path.read_text(encoding="utf-8").splitlines()

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return label and score for the probabilities of one picture, FP32 [1,1000]."""
        probabilities = np.asarray(inputs[0])[0]
        best = int(probabilities.argmax())
        return [Tensor("label", self.labels[best].encode()), Tensor("score", probabilities[best : best + 1])]
