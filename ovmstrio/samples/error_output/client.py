"""Client of the sample error_output: ``python -m ovmstrio.samples.error_output.client``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ovmstrio import Array
from ovmstrio.samples.triton import Stream, arguments, as_text, failures_end_the_program

__all__ = ["MATRICES", "inverses"]

MATRICES = (np.array([[2.0, 0.0], [0.0, 4.0]]), np.array([[1.0, 2.0], [2.0, 4.0]]), np.array([[0.0, 1.0], [1.0, 0.0]]))
"""Matrices to invert; the second one is singular."""


def inverses(url: str, matrices: Sequence[Array], model: str = "error_output") -> Iterator[Array | str]:
    """Return the inverse of each matrix, or the error message."""
    with Stream(url, model) as stream:
        for matrix in matrices:
            stream.send({"input": matrix})
            reply = stream.receive()
            yield reply.value if reply.name == "result" else as_text(reply.value)


if __name__ == "__main__":
    options = arguments("Invert three matrices over one stream.", "error_output")
    with failures_end_the_program():
        for answer in inverses(options.url, MATRICES, options.model):
            print(answer if isinstance(answer, str) else answer.tolist())
