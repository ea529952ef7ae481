"""The client of a Python handler's models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ModelClient"]


class ModelClient(ABC):
    """What a constructor gets as ``model_client``; its methods may be called from any thread, and block."""

    @abstractmethod
    def get_model(self, model_name: str | None = None, model_version: str | int | None = "latest") -> Any:
        """Give what ``load_model`` returned for a version of a model, loading it if need be.

        Args:
            model_name: of the model; only left out where the project has a single one by its ``path``.
            model_version: a number, or ``"latest"``, which nothing means, too.

        Raises:
            UserRuntimeException: there is no such model or version, or it cannot be loaded.
        """

    @abstractmethod
    def set_load_method(self, load_model: Callable[[str], Any]) -> None:
        """Say how models are loaded from their folders; the server does this with the handler's ``load_model``."""

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Any]:
        """The models by name, each with its ``versions`` and ``timestamps``."""

    @property
    @abstractmethod
    def caching(self) -> bool:
        """Whether models come and go by their use."""
