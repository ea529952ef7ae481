"""The connections that a parent has given away, for it to go on with those whose process has died."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ovmstrio.core.peers import UNKNOWN
from ovmstrio.server.workers.journal import NO_SLOT, SLOTS
from ovmstrio.server.workers.socket_counts import written_bytes

if TYPE_CHECKING:
    import trio

    from ovmstrio.core.peers import ClientAddress
    from ovmstrio.server.workers.board import Board
    from ovmstrio.server.workers.journal import Journal, Standing

__all__ = ["GivenConnection", "GivenConnections"]


@dataclass(slots=True, eq=False)
class GivenConnection:
    """A connection that is to be given to a process, or has been.

    Attributes:
        protocol: what is spoken.
        stream: the connection, as long as the parent may have to go on with it.
        answered: how many of its bytes have been answered.
        kept: those that have been read besides.
        tries: how many processes have ended that had read of a request of it.
        is_lost: whether the process that it was given to has ended, and somebody sees to it.
        peer_address: its other end, as ``accept`` reported it.
    """

    protocol: str
    stream: trio.SocketStream
    answered: int = 0
    kept: bytes = b""
    tries: int = 0
    is_lost: bool = False
    peer_address: ClientAddress = UNKNOWN

    def close(self) -> None:
        """Close the parent's descriptor of it."""
        self.stream.socket.close()


class _Row:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.placed: dict[int, GivenConnection] = {}
        self.free: list[int] = list(range(SLOTS))
        self.ended = 0

    def reap(self) -> None:
        """Close what the process has closed."""
        ended = self.journal.ended_since(self.ended)
        self.ended += len(ended)
        for slot in ended:
            self.placed.pop(slot).close()
            self.free.append(slot)


class GivenConnections:
    """What every process has.

    Args:
        board: has a journal of each of them.
    """

    def __init__(self, board: Board) -> None:
        self._rows = [_Row(board.journal(row)) for row in range(board.rows)]

    def place(self, row: int, connection: GivenConnection) -> int:
        """Keep a connection that a process is about to get; gives its slot, ``NO_SLOT`` if all are taken."""
        self.reap()
        connection.is_lost = False
        into = self._rows[row]
        if not into.free:
            return NO_SLOT
        slot = into.free.pop()
        into.placed[slot] = connection
        written = written_bytes(connection.stream.socket)
        into.journal.give(slot, connection.answered, connection.kept, written)
        return slot

    def reap(self) -> None:
        """Close what processes have closed."""
        for row in self._rows:
            row.reap()

    def take_back(self, row: int, slot: int) -> None:
        """Forget that a process was about to get a connection, which it did not."""
        if slot != NO_SLOT:
            self._rows[row].free.append(slot)
            del self._rows[row].placed[slot]

    def lose(self, row: int) -> list[tuple[GivenConnection, Standing]]:
        """Give the connections of a process that has ended, and how each of them stood; the caller sees to them."""
        lost = self._rows[row]
        lost.reap()
        found = []
        for slot, connection in lost.placed.items():
            connection.is_lost = True
            found.append((connection, lost.journal.standing(slot, connection.stream.socket)))
        lost.journal.clear()
        self._rows[row] = _Row(lost.journal)
        return found

    def close(self) -> None:
        """Close all of them."""
        for row in self._rows:
            for connection in row.placed.values():
                connection.close()
            row.placed.clear()
