"""Request batching API."""

from ovmstrio.serving.batching import Batcher, BatchOptions, BatchPolicy, open_batcher

__all__ = [
    "BatchOptions",
    "BatchPolicy",
    "Batcher",
    "open_batcher",
]
