"""Client of the sample incrementer: ``python -m ovmstrio.samples.incrementer.client [--input NUMBER...]``."""

from __future__ import annotations

import numpy as np

from ovmstrio import Array
from ovmstrio.samples.triton import InferenceServerClient, arguments, as_input, failures_end_the_program

__all__ = ["count_on"]


def count_on(url: str, numbers: Array, model: str = "incrementer") -> Array:
    """Send numbers through the graph in one call."""
    with InferenceServerClient(url) as client:
        result = client.infer(model, [as_input("first_number", numbers)])
    return np.asarray(result.as_numpy("last_number"))


if __name__ == "__main__":
    options = arguments("Add three to numbers.", "incrementer", {"metavar": "NUMBER", "type": int, "nargs": "+"})
    given = np.array(options.input or [1, 2, 3], np.int64)
    with failures_end_the_program():
        print(*given, "->", *count_on(options.url, given, options.model))
