"""Measurement of the memory that an error references through the frames of its traceback."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def bytes_referenced_by(refused: Callable[[], BaseException]) -> int:
    """Return how much more memory is in use while the error of ``refused`` is held."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        error = refused()
        kept = tracemalloc.get_traced_memory()[0] - before
        assert error.__traceback__ is not None
        return kept
    finally:
        tracemalloc.stop()
