"""Custom node that combines the probabilities of two models to one vote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Voting:
    """Parameters of the node: the class names, each a row of bytes, and the weight of each model's vote."""

    names: NDArray[Any]
    weights: tuple[float, float]


def initialize(params: Mapping[str, str]) -> Voting:
    """Parse the parameters once; the result is the last argument of the other functions."""
    names = [name.strip().encode() for name in params["names"].split(",")]
    longest = max(map(len, names)) + 1
    rows = np.array([list(name.ljust(longest, b"\0")) for name in names], np.uint8)
    first, second = map(float, params.get("weights", "0.5,0.5").split(","))
    return Voting(rows, (first, second))


def get_inputs_info(_params: Mapping[str, str], voting: Voting) -> dict[str, tuple[str, list[int]]]:
    """Describe the inputs: one row of probabilities per classified item, from each model."""
    shape = [-1, len(voting.names)]
    return {"first": ("FP32", shape), "second": ("FP32", shape)}


def get_outputs_info(_params: Mapping[str, str], voting: Voting) -> dict[str, tuple[str, list[int]]]:
    """Describe the outputs; the suffix ``_string`` makes the server send rows of bytes as strings."""
    return {
        "name_string": ("UINT8", [-1, -1]),
        "probabilities": ("FP32", [-1, len(voting.names)]),
        "agreed": ("BOOL", [-1]),
    }


def execute(inputs: Mapping[str, NDArray[Any]], _params: Mapping[str, str], voting: Voting) -> dict[str, NDArray[Any]]:
    """Return the weighted probabilities, the likeliest class, and whether both models agree."""
    first, second = inputs["first"], inputs["second"]
    weighed = np.average([first, second], axis=0, weights=voting.weights).astype(np.float32)
    return {
        "name_string": voting.names[weighed.argmax(axis=1)],
        "probabilities": weighed,
        "agreed": first.argmax(axis=1) == second.argmax(axis=1),
    }
