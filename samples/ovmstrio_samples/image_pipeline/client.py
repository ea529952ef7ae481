"""What is in a photograph: ``python -m ovmstrio_samples.image_pipeline.client [PICTURE...]``."""

from __future__ import annotations

from pathlib import Path

from ovmstrio_samples.triton import InferenceServerClient, arguments, as_input, as_text, failures_end_the_program

__all__ = ["COFFEE", "classify"]

COFFEE = Path(__file__).with_name("coffee.jpg")
"""A photograph by Rachel Michetti, who has put it into the public domain (CC0)."""


def classify(url: str, picture: Path) -> tuple[str, float]:
    """Send a picture file as it is; give the name of what is in it and the model's confidence."""
    with InferenceServerClient(url) as client:
        result = client.infer("image_pipeline", [as_input("image", picture.read_bytes())])
    return as_text(result.as_numpy("label")), float(result.as_numpy("score")[0])


if __name__ == "__main__":
    options = arguments("What is in a photograph?", ("pictures", {"metavar": "PICTURE", "type": Path, "nargs": "*"}))
    with failures_end_the_program():
        for path in options.pictures or [COFFEE]:
            label, score = classify(options.url, path)
            print(f"{path.name}: {label} ({score:.0%})")
