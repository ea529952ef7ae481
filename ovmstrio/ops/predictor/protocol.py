"""Predictor protocol between Op workers and models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.ops.settings import OpSettings


class FeedMismatch(InvalidRequest):
    """Mismatch of feed names, feed shapes or requested outputs with the model."""


class FeedTypeError(InvalidRequest):
    """Unsupported type of a feed value."""


Feed = Mapping[str, Any]
"""Values by feed alias: arrays, or lists of ``str``."""
Prediction = dict[str, Any]
"""Values by fetch alias: arrays; texts of another pipeline are lists of one ``str``."""


class Predictor(Protocol):
    """Predictor of one worker of an Op."""

    @property
    def feed_names(self) -> Sequence[str]:
        """Input aliases; empty if only the server knows them."""
        ...

    @property
    def fetch_names(self) -> Sequence[str]:
        """Output aliases; empty if only the server knows them."""
        ...

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> Prediction:
        """Run the model; without ``fetch`` returns the Op's configured outputs.

        Feed values must stay unchanged until this returns.  ``batch`` means that values have a batch axis.

        Raises:
            FeedMismatch: names or shapes do not match the model, or an output is unknown.
            FeedTypeError: a value is neither an array nor a list of ``str``.
            ModelFailure: the model failed.
            ServerError: a remote server rejected the request or did not answer.

        Cancellation: stops the inference.
        """
        ...

    def check(self, feed: Feed) -> None:
        """Raise FeedMismatch or FeedTypeError for a batched feed, before it is merged with others."""
        ...

    def close(self) -> None:
        """Release connections and memory."""
        ...


CreatePredictor = Callable[[OpSettings, int], Awaitable[Predictor]]
"""Factory of predictors, from the Op's settings and the worker's number."""
