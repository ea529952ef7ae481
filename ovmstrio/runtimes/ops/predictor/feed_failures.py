"""What is wrong with what an Op gives its model."""

from __future__ import annotations

from ovmstrio.core.errors import InvalidRequest

__all__ = ["FeedMismatch", "FeedTypeError"]


class FeedMismatch(InvalidRequest):
    """The names or shapes of a feed, or the names to fetch, are not those of the model."""


class FeedTypeError(InvalidRequest):
    """A value of a feed is nothing that a model takes."""
