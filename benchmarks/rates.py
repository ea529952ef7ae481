"""Rate of a function in threads, counted after a warm-up."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pages_a_second"]

WARM_UP_SECONDS = 2.0


def pages_a_second(make: Callable[[], Callable[[], object]], threads: int, seconds: float) -> float:
    """Read pages in threads, each with its own state; count pages that start within the time."""
    counted: list[int] = []
    readers = [make() for _ in range(threads)]
    begin = time.perf_counter() + WARM_UP_SECONDS

    def work(read: Callable[[], object]) -> None:
        pages = 0
        while (now := time.perf_counter()) < begin + seconds:
            read()
            pages += now >= begin
        counted.append(pages)

    workers = [threading.Thread(target=work, args=(reader,)) for reader in readers]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if len(counted) < threads:
        sys.exit("a page was not read")
    return sum(counted) / (time.perf_counter() - begin)
