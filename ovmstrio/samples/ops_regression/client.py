"""Client of the sample ops_regression: ``python -m ovmstrio.samples.ops_regression.client``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ovmstrio.samples.calling import call
from ovmstrio.samples.command_line import arguments, failures_of_http_end_the_program

__all__ = ["FLOWERS", "widths"]

FLOWERS = (((5.1, 3.5, 1.4), 0.2), ((7.0, 3.2, 4.7), 1.4), ((6.3, 3.3, 6.0), 2.5))
"""Length and width of the sepals, length of the petals, and measured width of the petals (cm)."""


def widths(url: str, flowers: Sequence[tuple[float, ...]], model: str = "petal") -> list[float]:
    """Return an estimate (cm) for each flower."""
    x = ";".join(",".join(map(str, sizes)) for sizes in flowers)
    rows: list[list[float]] = json.loads(call(f"{url}/{model}/prediction", {"x": x})["width"])
    return [width for (width,) in rows]


if __name__ == "__main__":
    options = arguments("Estimate the petal widths of three flowers.", url="http://localhost:18082", model="petal")
    with failures_of_http_end_the_program():
        estimates = widths(options.url, [sizes for sizes, _ in FLOWERS], options.model)
    for (_, real), estimated in zip(FLOWERS, estimates, strict=True):
        print(f"estimated {estimated:.2f} cm, really {real} cm")
