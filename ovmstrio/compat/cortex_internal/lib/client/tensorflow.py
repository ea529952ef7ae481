"""Model client of TensorFlow handlers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

__all__ = ["TensorFlowClient"]


class TensorFlowClient(ABC):
    """Constructor argument ``tensorflow_client``; its methods block and are thread-safe."""

    @abstractmethod
    def predict(
        self,
        model_input: Mapping[str, Any],
        model_name: str | None = None,
        model_version: str | int | None = "latest",
    ) -> dict[str, Any]:
        """Run a model.

        Args:
            model_input: arrays or array-likes by input name.
            model_name: name of the model; optional if the project has a single model by ``path``.
            model_version: version number, or ``"latest"`` or None for the latest version.

        Raises:
            UserRuntimeException: the model or version does not exist, or an input does not match.
        """
