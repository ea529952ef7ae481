"""Which process of a server has which sequence, as one of them knows it."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import TooManySequences
from ovmstrio.core.sequence_owners import SequenceElsewhere
from ovmstrio.core.texts import utf8
from ovmstrio.server.workers.ledger_memory import key_of
from ovmstrio.server.workers.shared_ledger import SharedAccount

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.server.workers.board import Board

__all__ = ["BoardDirectory"]

_KEY_BYTES: Final = 6
_TOO_MANY: Final = "Max sequence number has been reached. Could not create new sequence."
_NO_ROOM: Final = (
    "no sequence can be found any more where another one is begun: max_sequence_number was raised much since the server"
    " was started; start it again"
)


class BoardDirectory:
    """The sequences of all processes, on the board that they share; see ``SequenceDirectory``.

    Two ids that come to the same key have one owner, which does no harm: it knows its sequences by their ids.

    Args:
        board: has the memory, and its lock.
        row: this process's.
        secret: what all processes have, and nobody else: nobody can choose ids that come to keys of his choice.
        settled: is called when all is noted that this process has from its predecessor.
    """

    def __init__(self, board: Board, row: int, secret: str, settled: Callable[[], None] = lambda: None) -> None:
        self._board = board
        self._row = row
        self._digest = blake2b(key=secret.encode()[: blake2b.MAX_KEY_SIZE], digest_size=_KEY_BYTES)
        self._settled = settled
        self._held: Counter[int] = Counter()
        self._alive: Counter[tuple[str, int]] = Counter()
        self._accounts: dict[tuple[str, int], SharedAccount] = {}

    def _key(self, model: str, identity: int | str) -> int:
        digest = self._digest.copy()
        digest.update(utf8(f"{identity}\0{model}"))
        return int.from_bytes(digest.digest(), "little")

    def find(self, model: str, identity: int | str) -> int | None:
        """Tell which process has an id, this one or another; None if nobody has."""
        return self._board.sequences.find(self._key(model, identity))

    def begin(self, model: str, version: int, identity: int | str, most: float) -> None:
        """Note that this process has a sequence, unless another one has its id, or there are ``most`` of the version.

        Raises:
            SequenceElsewhere: another process has the id.
            TooManySequences: there are as many as may be, in all processes together; or nobody would find it.
        """
        key = self._key(model, identity)
        with self._board.locked():
            found = self._board.sequences.find(key)
            if found not in {None, self._row}:
                raise SequenceElsewhere
            account = self._account(model, version)
            alive = self._alive[model, version]
            if most < math.inf and alive + account.elsewhere().under_way >= most:
                raise TooManySequences(_TOO_MANY)
            if found is None and not self._board.sequences.put(key, self._row):
                raise TooManySequences(_NO_ROOM)
            self._held[key] += 1
            self._alive[model, version] = alive + 1
            account.write(alive + 1)

    def end(self, model: str, version: int, identity: int | str) -> None:
        """Note that a sequence of this process is over."""
        key = self._key(model, identity)
        with self._board.locked():
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._board.sequences.remove(key)
            self._alive[model, version] -= 1
            self._account(model, version).write(self._alive[model, version])

    def count(self, model: str, version: int) -> int:
        """Count the sequences of a version in all processes."""
        with self._board.locked():
            return self._alive[model, version] + self._account(model, version).elsewhere().under_way

    def next_id(self, least: int) -> int:
        """Give a number, not below ``least``, that no process has been given before."""
        with self._board.locked():
            return self._board.sequences.next_id(least)

    def settle(self, next_id: int) -> None:
        """Say that all is noted that this process has from its predecessor; what else that had is over."""
        with self._board.locked():
            self._board.sequences.skip_ids(next_id)
            for key in self._board.sequences.keys(self._row):
                if key not in self._held:
                    self._board.sequences.remove(key)
        self._settled()

    def _account(self, model: str, version: int) -> SharedAccount:
        """Give where processes count the sequences of a version; under the lock."""
        known = self._accounts.get((model, version))
        if known is None:
            name = f"sequences {model}/{version}"
            known = self._accounts[model, version] = SharedAccount(self._board.ledger, key_of(name), self._row)
        # It may have had another place while there were none.
        _ = known.under_way
        return known
