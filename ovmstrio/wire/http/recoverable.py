"""Connections whose requests somebody else can answer if this process dies before it has begun to."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.begun import telling_begin

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ovmstrio.core.begun import BeginTold

__all__ = ["RecoverableStream", "recoverable_request"]


class RecoverableStream(trio.abc.HalfCloseableStream):
    """A connection that keeps where it stands, and what it has read, where the end of the process does not reach it.

    It must be told how its bytes become requests; until :meth:`begin_lane` nothing is known of them.
    """

    @abstractmethod
    def begin_lane(self) -> None:
        """Say that requests are read from here one after the other, and that :meth:`finish` follows each answer."""

    @abstractmethod
    def begin(self, size: int | None) -> BeginTold:
        """Say that a request is to be answered.

        Args:
            size: how many bytes it has; None if that is not known, so that it is the last that can be recovered.

        Returns:
            What is to be told when code of users begins for it; from then on it is not made again.
        """

    @abstractmethod
    def end_after(self, size: int) -> None:
        """Say that the next so many bytes to be sent are an answer as a whole."""

    @abstractmethod
    def finish(self) -> None:
        """Say that the request has been answered as a whole."""


_NOTHING: Final = nullcontext()


def recoverable_request(stream: trio.abc.Stream, size: int | None) -> AbstractContextManager[None]:
    """Give what a request is answered in, for its connection to know when code of users begins."""
    return telling_begin(stream.begin(size)) if isinstance(stream, RecoverableStream) else _NOTHING
