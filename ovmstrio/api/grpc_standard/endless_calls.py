"""Calls that last as long as the client likes, and so must not hold up a drain."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from grpclib.const import Status
from grpclib.exceptions import GRPCError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.wire.grpc.stream import Call

__all__ = ["EndlessCalls"]


class EndlessCalls:
    """The open calls of one server that have no end of their own: health watches and reflection streams."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._ended = False

    @contextmanager
    def hold(self, call: Call) -> Iterator[None]:
        """Count a call among these while the block runs.

        Raises:
            GRPCError: UNAVAILABLE, when :meth:`end` has been called.
        """
        if self._ended:
            raise _shutting_down()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def end(self) -> None:
        """Cancel all of them with UNAVAILABLE and let no other begin."""
        self._ended = True
        for call in list(self._calls):
            call.cancel(_shutting_down())


def _shutting_down() -> GRPCError:
    return GRPCError(Status.UNAVAILABLE, "the server is shutting down")
