"""Reading of a page with rapidocr alone; runs in a separate environment and imports nothing else of this package.

Prints the median time per page, and its text.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["median_seconds"]

WARM_UP = 3
PAGES = 10


def median_seconds(read: Callable[[], object]) -> float:
    """Time the reading of a page, again and again."""
    times = []
    for _ in range(WARM_UP + PAGES):
        started = time.perf_counter()
        read()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def _main(page: Path) -> None:
    from rapidocr import EngineType, RapidOCR  # type: ignore[import-not-found] # noqa: PLC0415 - in an environment

    logging.disable(logging.CRITICAL)
    parts = {f"{part}.engine_type": EngineType.OPENVINO for part in ("Det", "Cls", "Rec")}
    reader = RapidOCR(params={**parts, "Global.use_cls": False})
    print(median_seconds(lambda: reader(page.read_bytes())))
    print("\n".join(reader(page.read_bytes()).txts))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
