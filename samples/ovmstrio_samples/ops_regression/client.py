"""Ask how wide the petals of three flowers are: ``python -m ovmstrio_samples.ops_regression.client [URL]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from ovmstrio_samples.calling import call

__all__ = ["FLOWERS", "widths"]

FLOWERS = (((5.1, 3.5, 1.4), 0.2), ((7.0, 3.2, 4.7), 1.4), ((6.3, 3.3, 6.0), 2.5))
"""Length and width of the sepals, length of the petals (cm), and how wide the petals really were."""


def widths(url: str, flowers: Sequence[tuple[float, ...]]) -> list[float]:
    """Give an estimate (cm) for each flower."""
    x = ";".join(",".join(map(str, sizes)) for sizes in flowers)
    rows: list[list[float]] = json.loads(call(f"{url}/petal/prediction", {"x": x})["width"])
    return [width for (width,) in rows]


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:18082"
    for (_, real), estimated in zip(FLOWERS, widths(url, [sizes for sizes, _ in FLOWERS]), strict=True):
        print(f"estimated {estimated:.2f} cm, really {real} cm")
