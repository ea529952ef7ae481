"""Predictors of models in this process, for workers that run on the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from ovmstrio.core.tensor import Array
from ovmstrio.openvino.network import Network
from ovmstrio.runtimes.ops.predictor.local_model import LocalModel
from ovmstrio.runtimes.ops.predictor.protocol import Feed

__all__ = ["LocalNetwork", "WorkerPredictor"]


class LocalNetwork:
    """A model with its infer requests, which all workers on its device share."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.network = Network(model.compiled)


class WorkerPredictor:
    """What one worker infers with.

    Args:
        shared: the model.
        fetch: what is fetched by default; without names, everything.

    Raises:
        FeedMismatch: the model does not give what is to be fetched.
    """

    def __init__(self, shared: LocalNetwork, fetch: Sequence[str]) -> None:
        self._shared = shared
        self._default = shared.model.wanted(fetch)

    @property
    def feed_names(self) -> list[str]:
        """The aliases of what the model takes."""
        return self._shared.model.feed_names

    @property
    def fetch_names(self) -> list[str]:
        """The aliases of what the model gives."""
        return self._shared.model.fetch_names

    async def predict(self, feed: Feed, fetch: Sequence[str] | None = None, *, batch: bool = True) -> dict[str, Array]:
        """Infer; without names in ``fetch`` gives what the Op is configured to fetch.

        Raises:
            FeedMismatch: names or shapes are not those of the model, or ``fetch`` names what it does not give.
            FeedTypeError: a value is neither an array nor a list of ``str``.
            ModelFailure: the model failed.

        Ownership: the feed's values must stay unchanged until it returns; the answer is the caller's.

        Cancellation: as :meth:`~ovmstrio.openvino.network.Network.infer`.
        """
        model = self._shared.model
        wanted = model.wanted(fetch) if fetch else self._default
        outputs = await self._shared.network.infer(model.arrays(feed, batch=batch))
        return model.answer(outputs, wanted)

    def check(self, feed: Feed) -> None:
        """Refuse a feed that can never be inferred on.

        Raises:
            FeedMismatch: names or shapes are not those of the model.
            FeedTypeError: a value is neither an array nor a list of ``str``.
        """
        self._shared.model.check(feed)

    def close(self) -> None:
        """Do nothing: the model is let go with the last of those who share it."""
