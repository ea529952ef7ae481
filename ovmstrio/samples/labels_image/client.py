"""Client of the sample labels_image: ``python -m ovmstrio.samples.labels_image.client [--input LABEL,LABEL...]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ovmstrio import Array
from ovmstrio.samples.triton import Stream, arguments, as_text, failures_end_the_program

__all__ = ["nearest", "plain"]


def plain(red: int, green: int, blue: int) -> Array:
    """Create a picture of one colour."""
    return np.full((4, 4, 3), (red, green, blue), np.uint8)


def nearest(url: str, labels: str, pictures: Sequence[Array], model: str = "labels_image") -> Iterator[str]:
    """Send the labels, which get no response, and then pictures; return the label of each picture."""
    with Stream(url, model) as stream:
        stream.send({"labels": labels})
        for picture in pictures:
            stream.send({"image": picture})
            yield as_text(stream.receive().value)


if __name__ == "__main__":
    options = arguments("Label pictures.", "labels_image", {"metavar": "LABELS", "default": "gold,navy,crimson"})
    with failures_end_the_program():
        pictures = [plain(0, 0, 90), plain(220, 30, 40), plain(240, 220, 20)]
        for label in nearest(options.url, options.input, pictures, options.model):
            print(label)
