"""The client of a TensorFlow handler's models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

__all__ = ["TensorFlowClient"]


class TensorFlowClient(ABC):
    """What a constructor gets as ``tensorflow_client``; its methods may be called from any thread, and block."""

    @abstractmethod
    def predict(
        self,
        model_input: Mapping[str, Any],
        model_name: str | None = None,
        model_version: str | int | None = "latest",
    ) -> dict[str, Any]:
        """Run a model.

        Args:
            model_input: arrays, or what can be made into them, by the names of the model's inputs.
            model_name: of the model; only left out where the project has a single one by its ``path``.
            model_version: a number, or ``"latest"``, which nothing means, too.

        Raises:
            UserRuntimeException: there is no such model or version, or an input does not fit.
        """
