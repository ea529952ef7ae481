"""How the processes of one server wake each other: each has an address, and a byte to it says no more than "look"."""

from __future__ import annotations

import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.server.workers.own_sockets import noted

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Bells"]

_LOOK: Final = b"!"
_MOST: Final = 64


class Bells:
    """The bells of all processes, as one of them has them.

    Args:
        secret: a text that all of them, and nobody else, have.
        row: this one's number.
    """

    def __init__(self, secret: str, row: int) -> None:
        self._secret = secret
        self._row = row
        self._end: socket.socket | None = None

    def _address(self, row: int) -> str:
        return f"\0ovmstrio-{self._secret}-bell-{row}"

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Have others ring this process within the block.

        Raises:
            OSError: the address is taken.

        Ownership: the socket.
        """
        with noted(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)) as end:
            end.bind(self._address(self._row))
            self._end = end
            try:
                yield
            finally:
                self._end = None

    def ring(self, rows: tuple[int, ...]) -> None:
        """Ring others; one that is not there has nobody to look, and one that has not heard yet need not hear more."""
        if self._end is None:
            return
        for row in rows:
            with suppress(OSError):
                self._end.sendto(_LOOK, self._address(row))

    async def rung(self) -> None:
        """Wait until somebody has rung.

        Cancellation: at once.
        """
        if self._end is None:
            await trio.sleep_forever()
        else:
            await trio.lowlevel.wait_readable(self._end)
            with suppress(OSError):
                for _ in range(_MOST):
                    self._end.recv(1)
