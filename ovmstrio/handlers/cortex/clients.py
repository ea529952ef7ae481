"""Interfaces of the model clients that constructors of handlers receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ModelClient", "TensorFlowClient"]


class ModelClient(ABC):
    """Constructor argument ``model_client``; its methods block and are thread-safe."""

    @abstractmethod
    def get_model(self, model_name: str | None = None, model_version: str | int | None = "latest") -> Any:
        """Return the result of ``load_model`` for a version of a model, which is loaded if necessary.

        Args:
            model_name: name of the model; optional if the project has a single model by ``path``.
            model_version: version number, or ``"latest"`` or None for the latest version.

        Raises:
            UserRuntimeException: the model or version does not exist, or cannot be loaded.
        """

    @abstractmethod
    def set_load_method(self, load_model: Callable[[str], Any]) -> None:
        """Set the function that loads a model from its folder; the server passes the handler's ``load_model``."""

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Any]:
        """Models by name, each with ``versions`` and ``timestamps``."""

    @property
    @abstractmethod
    def caching(self) -> bool:
        """True if models are loaded on demand and evicted."""


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
