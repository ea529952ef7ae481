"""Predictor protocol between Op workers and models, and the client that hooks use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import trio

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


class ModelClient:
    """Client of an Op's model for hooks, with the signature of Paddle Serving's clients; thread-safe.

    Attributes:
        predictor: predictor of the worker.
        feed_names_: input aliases; empty if only the server knows them.
        fetch_names_: output aliases; empty if only the server knows them.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.feed_names_ = list(predictor.feed_names)
        self.fetch_names_ = list(predictor.fetch_names)
        self._loop = trio.lowlevel.current_trio_token()

    def get_feed_names(self) -> list[str]:
        """Return the input aliases."""
        return self.feed_names_

    def get_fetch_names(self) -> list[str]:
        """Return the output aliases."""
        return self.fetch_names_

    def predict(
        self,
        feed: Feed | Sequence[Feed],
        fetch: str | Sequence[str] | None = None,
        batch: bool | None = None,
        log_id: int = 0,  # noqa: ARG002 - the signature that scripts call
    ) -> Any:
        """Run the model and return its outputs; an ``async`` hook must await the result.

        Args:
            feed: values by alias, or a list of such feeds, whose rows are joined.
            fetch: requested output aliases; the Op's configured outputs if empty.
            batch: whether values have a batch axis, which is added otherwise; by default it is added if it is missing.
            log_id: accepted for compatibility.

        Raises:
            ServerError: as :meth:`Predictor.predict`.
        """
        run = partial(self._predict, feed, [fetch] if isinstance(fetch, str) else fetch, batch)
        if trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._loop:
            return run()
        return trio.from_thread.run(run, trio_token=self._loop)

    async def _predict(
        self, feed: Feed | Sequence[Feed], fetch: Sequence[str] | None, batch: bool | None
    ) -> Prediction:  # fmt: skip
        feeds = [feed] if isinstance(feed, Mapping) else list(feed) or [{}]
        is_batched = self._has_batch_axis(feeds[0]) if batch is None else batch
        if len(feeds) == 1:
            return await self.predictor.predict(feeds[0], fetch, batch=is_batched)
        join = np.concatenate if is_batched else np.stack
        joined = {name: join([one[name] for one in feeds]) for name in feeds[0]}
        return await self.predictor.predict(joined, fetch, batch=True)

    def _has_batch_axis(self, feed: Feed) -> bool:
        try:
            self.predictor.check(feed)
        except FeedMismatch:
            return False
        return True
