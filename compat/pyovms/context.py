"""What user code may know of the call or stream that it works for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

__all__ = ["CURRENT", "Context", "Storage", "current_context"]


class Storage(dict[str, Any]):
    """What one node keeps for one call or stream: a dictionary whose items are attributes, too."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"nothing called {name!r} is stored; stored are: {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if self.pop(name, self) is self:
            raise AttributeError(f"nothing called {name!r} is stored")


class Context:
    """One node of one running graph: of a unary call, or of a stream with all its requests.

    Attributes:
        storage: for whatever the node wants to find again in its next run; nobody else sees it.
        parameters: those of the call, or of the first request of the stream; read only.
        request_id: the client's, empty where it gave none.
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
        """When the caller stops waiting, as ``time.time()`` counts; None if it waits for ever."""
        left = self._deadline - time.monotonic()
        return None if left == math.inf else time.time() + left

    def remaining(self) -> float | None:
        """Give the seconds until the deadline, 0 after it, None if there is none."""
        left = self._deadline - time.monotonic()
        return None if left == math.inf else max(0.0, left)

    def is_cancelled(self) -> bool:
        """Tell whether nobody wants the result any more; code that runs long should look now and then."""
        return self._is_cancelled()


CURRENT: Final[ContextVar[Context]] = ContextVar("pyovms.context")
"""Set by the server around everything that it calls of a node."""


def current_context() -> Context:
    """Give the context of the node that runs.

    Raises:
        RuntimeError: no node runs here.
    """
    try:
        return CURRENT.get()
    except LookupError:
        raise RuntimeError(
            "current_context() works in execute, open and close of a Python node and in its generators, not in "
            "initialize or finalize, and in threads that the handler starts only if they run in a copy of the context "
            "(contextvars.copy_context().run)"
        ) from None
