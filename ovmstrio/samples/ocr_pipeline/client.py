"""Client of the sample ocr_pipeline: ``python -m ovmstrio.samples.ocr_pipeline.client [--input PICTURE...]``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ovmstrio.samples.triton import (
    InferenceServerClient,
    InferenceServerException,
    arguments,
    as_input,
    failures_end_the_program,
)

__all__ = ["PAGE", "WORDS", "read_text"]

PAGE = Path(__file__).with_name("page.png")
"""A photograph of a printed page, from scikit-image (BSD-3-Clause)."""
WORDS = (
    "Region-based segmentation",
    "Let us first determine markers of the coins and the",
    "background. These markers are pixels that we can label",
    "unambiguously as either object or background. Here,",
    "the markers are found at the two extreme parts of the",
    "histogram of grey values:",
)
"""Text of the page, without the last line, which is half outside of the picture."""
_NO_LINE = "StatusCode.ABORTED"


def read_text(client: InferenceServerClient, picture: Path, model: str = "ocr_pipeline") -> list[str]:
    """Send an encoded picture and return its lines of text."""
    try:
        result = client.infer(model, [as_input("file", picture.read_bytes())])
    except InferenceServerException as error:
        # The pipeline returns this error if the demultiplexer has nothing to split.
        if error.status() == _NO_LINE:
            return []
        raise
    return [text.decode() for text in np.asarray(result.as_numpy("texts"))]


if __name__ == "__main__":
    files = {"metavar": "PICTURE", "type": Path, "nargs": "*", "default": [PAGE]}
    options = arguments("Read the text in pictures.", "ocr_pipeline", files)
    with failures_end_the_program(), InferenceServerClient(options.url) as server:
        for path in options.input:
            print("\n".join(read_text(server, path, options.model)))
