"""The one request batcher: models, handlers and Ops join the requests of many callers with it.

::

    callers ── submit ──> Batcher ── arrivals, departures, time ──> BatchPolicy
                             │ <──────── the next batch ────────────────┘
                             └── run(items) ── results by index ──> callers
"""

from ovmstrio.work.batching.batcher import Batcher, open_batcher
from ovmstrio.work.batching.policy import BatchOptions, BatchPolicy

__all__ = ["BatchOptions", "BatchPolicy", "Batcher", "open_batcher"]
