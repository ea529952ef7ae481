"""How long the layers of a model take: values, and the port of whoever can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["LayerTime", "LayerTimes", "LayeredServable"]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer as the device runs it; several of the file's may be one.

    ``runs_as`` is what the device calls the way in which it runs, ``seconds`` the time of one inference, on average.
    """

    name: str
    type: str
    runs_as: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What so many inferences took each, on average, and their layers in the order in which they run."""

    runs: int
    seconds: float
    layers: tuple[LayerTime, ...]


@runtime_checkable
class LayeredServable(Protocol):
    """A servable whose layers can be timed."""

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Time the layers on inputs of ones whose open dimensions are 1, for about so long.

        Raises:
            ModelFailure: the model does not run on these, or its device tells no times.

        Ownership: a copy of the model, compiled with times, which is gone when this returns.
        Cancellation: at once; the copy runs on in its thread for no longer than ``seconds``.
        """
        ...
