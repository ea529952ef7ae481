"""``ReaderBase``: names of a model's inputs."""

from __future__ import annotations

__all__ = ["ReaderBase"]


class ReaderBase:
    """Knows under which names it gives what it has read."""

    def __init__(self) -> None:
        self.feed_keys: list[str] = []

    def set_feed_keys(self, keys: list[str]) -> None:
        """Let inputs have other names."""
        self.feed_keys = keys

    def get_feed_keys(self) -> list[str]:
        """Give the inputs' names."""
        return self.feed_keys
