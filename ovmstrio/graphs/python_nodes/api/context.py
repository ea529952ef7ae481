"""Context of a Python node's call or stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

__all__ = ["CURRENT", "Context", "Storage", "current_context"]


class Storage(dict[str, Any]):
    """Dictionary with attribute access, for one node in one call or stream."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"storage has no {name!r}; stored names: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if self.pop(name, self) is self:
            raise AttributeError(f"storage has no {name!r}")


class Context:
    """Context of one node in a unary call, or in a stream with all its requests.

    Attributes:
        storage: values that the node keeps between its runs, private to the node.
        parameters: read-only parameters of the call, or of the first request of the stream.
        request_id: the client's request id; empty if not set.
    """

    __slots__ = ("_deadline", "_is_cancelled", "parameters", "request_id", "storage")

    def __init__(
        self,
        parameters: Mapping[str, Any],
        request_id: str,
        seconds: float = math.inf,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.storage = Storage()
        self.parameters: Mapping[str, Any] = MappingProxyType(dict(parameters))
        self.request_id = request_id
        self._deadline = time.monotonic() + seconds
        self._is_cancelled = is_cancelled

    @property
    def deadline(self) -> float | None:
        """Deadline in seconds since the epoch, as ``time.time()``; None without a deadline."""
        left = self._deadline - time.monotonic()
        return None if left == math.inf else time.time() + left

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, 0 after it, None without a deadline."""
        left = self._deadline - time.monotonic()
        return None if left == math.inf else max(0.0, left)

    def is_cancelled(self) -> bool:
        """Return whether the call was cancelled; long-running code should check this regularly."""
        return self._is_cancelled()


CURRENT: Final[ContextVar[Context]] = ContextVar("pyovms.context")
"""Set by the server for every call of a node's methods."""


def current_context() -> Context:
    """Return the context of the running node.

    Raises:
        RuntimeError: no node runs in this context.
    """
    try:
        return CURRENT.get()
    except LookupError:
        raise RuntimeError(
            "current_context() works in execute, open and close of a Python node and in its generators, not in "
            "initialize or finalize, and in threads that the handler starts only if they run in a copy of the context "
            "(contextvars.copy_context().run)"
        ) from None
