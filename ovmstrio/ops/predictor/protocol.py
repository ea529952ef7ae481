"""What an Op's workers need of whatever runs their model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.ops.settings import OpSettings

__all__ = ["Feed", "FeedMismatch", "FeedTypeError", "MakePredictor", "Prediction", "Predictor"]


class FeedMismatch(InvalidRequest):
    """The names or shapes of a feed, or the names to fetch, are not those of the model."""


class FeedTypeError(InvalidRequest):
    """A value of a feed is nothing that a model takes."""


Feed = Mapping[str, Any]
"""Values by feed alias: arrays, or lists of ``str``."""
Prediction = dict[str, Any]
"""Values by fetch alias: arrays; of another pipeline without tensors, lists of one ``str``."""


class Predictor(Protocol):
    """Infers for one worker of an Op, wherever the model is."""

    @property
    def feed_names(self) -> Sequence[str]:
        """The aliases of what it takes; none where the other server alone knows."""
        ...

    @property
    def fetch_names(self) -> Sequence[str]:
        """The aliases of all that it can give; none where the other server alone knows."""
        ...

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> Prediction:
        """Infer; without names in ``fetch`` gives what the Op is configured to fetch.

        ``batch`` tells that values have the leading axis already.

        Raises:
            FeedMismatch: names or shapes are not those of the model, or ``fetch`` names what it does not give.
            FeedTypeError: a value is neither an array nor a list of ``str``.
            ModelFailure: the model failed.
            ServerError: another server refused or did not answer; the class tells which.

        Ownership: the feed's values must stay unchanged until it returns; the answer is the caller's.

        Cancellation: at any time; the inference is stopped.
        """
        ...

    def check(self, feed: Feed) -> None:
        """Refuse a feed with its batch axis that can never be inferred on, before it is merged with others.

        Raises:
            FeedMismatch: names or shapes are not those of the model.
            FeedTypeError: a value is neither an array nor a list of ``str``.
        """
        ...

    def close(self) -> None:
        """Let go of connections and memory; nothing is inferred any more."""
        ...


MakePredictor = Callable[[OpSettings, int], Awaitable[Predictor]]
"""Makes what a worker infers with, by the Op's settings and the worker's number."""
