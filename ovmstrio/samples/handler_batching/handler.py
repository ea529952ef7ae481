"""Handler that classifies the flowers of many requests in one matrix product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


class Handler:
    """Handler whose method gets lists, because of ``server_side_batching``."""

    def __init__(self) -> None:
        fitted = json.loads(Path("coefficients.json").read_text(encoding="utf-8"))
        self.classes = fitted["classes"]
        self.weights = np.array(fitted["weights"]).T
        self.intercepts = np.array(fitted["intercepts"])

    def handle_post(self, payload: list[Any]) -> list[dict[str, Any] | Exception]:
        """Classify the flowers of all payloads, each a list of four numbers; an invalid one fails alone."""
        rows = [_row(each) for each in payload]
        sizes = np.array([np.zeros(4) if isinstance(row, Exception) else row for row in rows])
        labels = (sizes @ self.weights + self.intercepts).argmax(1)
        answers = ({"species": self.classes[label], "batch_size": len(rows)} for label in labels)
        return [row if isinstance(row, Exception) else answer for row, answer in zip(rows, answers, strict=True)]


def _row(payload: Any) -> Any:
    try:
        return np.array(payload, float).reshape(4)
    except (TypeError, ValueError) as error:
        return error
