"""Client of the sample ops_ocr: ``python -m ovmstrio.samples.ops_ocr.client [--input PICTURE...]``."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from ovmstrio.samples.calling import call
from ovmstrio.samples.command_line import arguments, failures_of_http_end_the_program

__all__ = ["PAGE", "WORDS", "read_text"]

PAGE = Path(__file__).parents[1] / "ocr_pipeline" / "page.png"
"""A photograph of a printed page, from scikit-image (BSD-3-Clause)."""
WORDS = ("segmentation", "determine markers of the coins", "unambiguously", "two extreme parts", "histogram of grey")
"""Some lines of the page, from top to bottom."""


def read_text(url: str, path: Path, model: str = "ocr") -> list[str]:
    """Return the lines of text in a picture file."""
    image = base64.b64encode(path.read_bytes()).decode()
    texts: list[str] = json.loads(call(f"{url}/{model}/prediction", {"image": image})["texts"])
    return texts


if __name__ == "__main__":
    files = {"metavar": "PICTURE", "type": Path, "nargs": "*", "default": [PAGE]}
    options = arguments("Read the text in pictures.", url="http://localhost:9998", model="ocr", given=files)
    with failures_of_http_end_the_program():
        for file in options.input:
            print("\n".join(read_text(options.url, file, options.model)))
