"""``ReaderBase``, with the names of a model's inputs."""

from __future__ import annotations

__all__ = ["ReaderBase"]


class ReaderBase:
    """Base of readers with input names."""

    def __init__(self) -> None:
        self.feed_keys: list[str] = []

    def set_feed_keys(self, keys: list[str]) -> None:
        """Set the input names."""
        self.feed_keys = keys

    def get_feed_keys(self) -> list[str]:
        """Return the input names."""
        return self.feed_keys
