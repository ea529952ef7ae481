"""Answers written as bytes: never those that are too large, and the large ones in a thread."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.core.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.events import Door, Interface
    from ovmstrio.core.request import InferResponse

__all__ = ["Renderer"]

_T = TypeVar("_T")

_AT_ONCE: Final[dict[Interface, int]] = {"gRPC": 2 * 2**20, "REST": 256 * 1024}
"""Bytes of outputs that are written within a millisecond or two: as they are, or as the text of numbers."""
_THREADS: Final = 2


class Renderer:
    """Writes the answers of one server.

    Args:
        most_bytes: how large the outputs of an answer may be together.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        self.most_bytes = most_bytes
        # More would only take the interpreter's lock from the event loop in turn.
        self._threads = trio.CapacityLimiter(_THREADS)

    def may_at_once(self, response: InferResponse, door: Door) -> bool:
        """Tell whether a response is small enough to be written on the event loop, without :meth:`render`.

        Raises:
            PayloadTooLarge: the outputs are too large.
        """
        only = response.outputs[0] if len(response.outputs) == 1 else None
        # Every answer is asked, and most have one output, of numbers.
        size = only.array.nbytes if type(only) is Tensor and not only.array.dtype.hasobject else response.nbytes
        if size > self.most_bytes:
            raise PayloadTooLarge.of_outputs(size, self.most_bytes)
        return size <= _AT_ONCE[door.interface] or (door.interface == "gRPC" and response.lies_as_sent)

    async def render(self, write: Callable[[InferResponse], _T], response: InferResponse, door: Door) -> _T:
        """Give what ``write`` makes of a response.

        Raises:
            PayloadTooLarge: the outputs are too large; nothing has been copied.
            Exception: as ``write``.

        Cancellation: not while it is written; one that waits to be written leaves at once.
        """
        if self.may_at_once(response, door):
            return write(response)
        return await trio.to_thread.run_sync(write, response, limiter=self._threads)
