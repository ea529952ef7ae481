"""Client of the sample handler_batching: ``python -m ovmstrio.samples.handler_batching.client``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ovmstrio.samples.command_line import arguments, call_json, failures_of_http_end_the_program
from ovmstrio.samples.iris.flowers import FLOWERS

__all__ = ["classify"]

REQUESTS = 48


def classify(url: str, sizes: tuple[float, ...]) -> dict[str, Any]:
    """Return the species of a flower with these sizes (cm), and the number of flowers in its batch."""
    answer: dict[str, Any] = call_json(url, sizes)
    return answer


if __name__ == "__main__":
    options = arguments("Classify 48 flowers concurrently.", url="http://localhost:8080")
    flowers = [FLOWERS[number % len(FLOWERS)] for number in range(REQUESTS)]
    with failures_of_http_end_the_program(), ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda flower: classify(options.url, flower[0]), flowers))
    right = sum(answer["species"] == species for answer, (_, species) in zip(answers, flowers, strict=True))
    print(f"{right} of {REQUESTS} are right; the batches had up to {max(answer['batch_size'] for answer in answers)}")
