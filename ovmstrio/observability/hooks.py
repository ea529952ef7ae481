"""What a model tells of each inference, for whoever counts: a port, and an implementation that counts nothing."""

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["NULL_HOOKS", "NullHooks", "ServableHooks"]


class ServableHooks(Protocol):
    """Observes one loaded model version.  Every method is called on the event loop and must not wait."""

    def inference_time(self, seconds: float) -> None:
        """One inference took this long in the runtime."""
        ...

    def wait_time(self, seconds: float) -> None:
        """One request waited this long for a free infer request (0 where it ran on the event loop)."""
        ...

    def set_streams(self, count: int) -> None:
        """The compiled model has this many streams."""
        ...

    def set_pool(self, size: int, active: int) -> None:
        """The pool has ``size`` infer requests, ``active`` of which are in use."""
        ...


class NullHooks:
    """Hooks for models that nobody observes."""

    def inference_time(self, seconds: float) -> None:
        """Ignore it."""

    def wait_time(self, seconds: float) -> None:
        """Ignore it."""

    def set_streams(self, count: int) -> None:
        """Ignore it."""

    def set_pool(self, size: int, active: int) -> None:
        """Ignore it."""


NULL_HOOKS: Final = NullHooks()
