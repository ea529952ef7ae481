"""Client of the sample image_pipeline: ``python -m ovmstrio.samples.image_pipeline.client [--input PICTURE...]``."""

from __future__ import annotations

from pathlib import Path

from ovmstrio.samples.triton import InferenceServerClient, arguments, as_input, as_text, failures_end_the_program

__all__ = ["COFFEE", "classify"]

COFFEE = Path(__file__).with_name("coffee.jpg")
"""A photograph by Rachel Michetti, who has put it into the public domain (CC0)."""


def classify(url: str, picture: Path, model: str = "image_pipeline") -> tuple[str, float]:
    """Send an encoded picture and return its label and the model's score."""
    with InferenceServerClient(url) as client:
        result = client.infer(model, [as_input("image", picture.read_bytes())])
    return as_text(result.as_numpy("label")), float(result.as_numpy("score")[0])


if __name__ == "__main__":
    files = {"metavar": "PICTURE", "type": Path, "nargs": "*", "default": [COFFEE]}
    options = arguments("Classify pictures.", "image_pipeline", files)
    with failures_end_the_program():
        for path in options.input:
            label, score = classify(options.url, path, options.model)
            print(f"{path.name}: {label} ({score:.0%})")
