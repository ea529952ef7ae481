"""A process without free file descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def without_free_descriptors() -> Iterator[int]:
    """Take all file descriptors of this process within the block; yields their number, which is the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        last = os.dup(0)
        taken.callback(os.close, last)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
        # Descriptors below the limit may be free.
        with suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(0))
        yield last + 1
