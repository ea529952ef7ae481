"""The last handler: probabilities become the name of the likeliest class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pyovms import Tensor


class OvmsPythonModel:
    """Knows the names of ImageNet's classes, which lie beside this file."""

    def initialize(self, kwargs: dict[str, Any]) -> None:
        """Read the names once, for all requests."""
        path = Path(kwargs["base_path"]) / "labels.txt"
        self.labels = path.read_text(encoding="utf-8").splitlines()

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Handle the probabilities of one picture, FP32 [1,1000]."""
        probabilities = np.asarray(inputs[0])[0]
        best = int(probabilities.argmax())
        return [Tensor("label", self.labels[best].encode()), Tensor("score", probabilities[best : best + 1])]
