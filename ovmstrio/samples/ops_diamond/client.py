"""Client of the sample ops_diamond: ``python -m ovmstrio.samples.ops_diamond.client``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ovmstrio.samples.calling import call
from ovmstrio.samples.command_line import arguments, failures_of_http_end_the_program
from ovmstrio.samples.ops_regression.client import FLOWERS

__all__ = ["estimate"]

REQUESTS = 48


def estimate(url: str, sizes: tuple[float, ...], model: str = "diamond") -> tuple[float, float]:
    """Return the estimated width (cm) of a flower's petals, and the difference between both models."""
    answer = call(f"{url}/{model}/prediction", {"x": ",".join(map(str, sizes))})
    return float(answer["width"]), float(answer["apart"])


if __name__ == "__main__":
    options = arguments("Estimate petal widths of 48 flowers.", url="http://localhost:18083", model="diamond")
    with failures_of_http_end_the_program(), ThreadPoolExecutor(REQUESTS) as pool:
        flowers = [FLOWERS[number % len(FLOWERS)][0] for number in range(REQUESTS)]
        answers = list(pool.map(lambda sizes: estimate(options.url, sizes, options.model), flowers))
    for (_, real), (width, apart) in zip(FLOWERS, answers, strict=False):
        print(f"estimated {width:.2f} cm (the models are {apart:.2f} apart), really {real} cm")
    print(f"{len(answers)} answers")
