"""Gathering node that decodes the steps of each line to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Info = dict[str, tuple[str, list[int]]]

_NOTHING: Final = 0


def initialize(_params: Mapping[str, str]) -> list[str]:
    """Load the recognition model's classes: nothing, then the characters of the file, then a blank."""
    listed = Path(__file__).with_name("characters.txt").read_text(encoding="utf-8")
    return ["", *listed.splitlines(), " "]


def get_inputs_info(_params: Mapping[str, str]) -> Info:
    """Describe the inputs: steps and corners of all lines."""
    return {"characters": ("INT32", [-1, 1, -1]), "likely": ("FP32", [-1, 1, -1]), "boxes": ("INT32", [-1, 4, 2])}


def get_outputs_info(_params: Mapping[str, str]) -> Info:
    """Describe the outputs: the lines that were read with a sufficient score."""
    return {"texts_string": ("UINT8", [-1, -1]), "scores": ("FP32", [-1]), "boxes": ("INT32", [-1, 4, 2])}


def _rows(texts: Sequence[str]) -> NDArray[Any]:
    """Encode texts as rows of bytes with trailing zeros."""
    encoded = [text.encode() for text in texts]
    rows = np.zeros((len(encoded), max(map(len, encoded), default=0) + 1), np.uint8)
    for row, text in zip(rows, encoded, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return rows


def execute(
    inputs: Mapping[str, NDArray[Any]], params: Mapping[str, str], characters: list[str]
) -> dict[str, NDArray[Any]]:
    """Decode each line; repeated and blank steps add no character."""
    steps, likely = inputs["characters"][:, 0], inputs["likely"][:, 0]
    counts = steps != _NOTHING
    counts[:, 1:] &= steps[:, 1:] != steps[:, :-1]
    texts = ["".join(characters[step] for step in line[kept]) for line, kept in zip(steps, counts, strict=True)]
    scores = (likely * counts).sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    good = np.flatnonzero(scores >= float(params["score_threshold"]))
    return {
        "texts_string": _rows([texts[number] for number in good]),
        "scores": scores[good].astype(np.float32),
        "boxes": inputs["boxes"][good],
    }
