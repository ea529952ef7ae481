"""Ask for many species at once: ``python -m ovmstrio_samples.handler_batching.client [URL]``."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

from ovmstrio_samples.iris.client import FLOWERS

__all__ = ["classify"]

ASKED = 48


def classify(url: str, sizes: tuple[float, ...]) -> dict[str, Any]:
    """Give the species of a flower of these sizes (cm), and how many flowers were in the same batch."""
    headers = {"Content-Type": "application/json"}
    request = Request(url, json.dumps(sizes).encode(), headers)  # noqa: S310 - the user's own address
    with urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
        told: dict[str, Any] = json.load(answer)
    return told


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
    flowers = [FLOWERS[number % len(FLOWERS)] for number in range(ASKED)]
    with ThreadPoolExecutor(ASKED) as pool:
        answers = list(pool.map(lambda flower: classify(url, flower[0]), flowers))
    right = sum(answer["species"] == species for answer, (_, species) in zip(answers, flowers, strict=True))
    print(f"{right} of {ASKED} are right; the batches had up to {max(answer['batch_size'] for answer in answers)}")
