"""The limit of requests in flight, in one process and over many."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ovmstrio.core.errors import TooManyRequests
from ovmstrio.core.limits import LocalLimit
from ovmstrio.server.workers.board import Board, SharedLimit

CHILD = """
import sys
from ovmstrio.core.errors import TooManyRequests
from ovmstrio.server.workers.board import Board, SharedLimit

board = Board(int(sys.argv[1]), 3)
limit = SharedLimit(board, int(sys.argv[2]), 2)
sys.stdin.readline()
most = taken = 0
for _ in range(20_000):
    try:
        limit.take()
    except TooManyRequests:
        continue
    taken += 1
    with board.locked():
        most = max(most, board.total_in_flight())
    limit.give_back()
print(most, taken)
"""


@pytest.fixture
def board() -> Iterator[Board]:
    """A board of three processes."""
    made = Board.create(3)
    yield made
    made.close()


def test_a_limit_refuses_what_is_beyond_it() -> None:
    """And nothing once there is room again."""
    limit = LocalLimit(2)
    limit.take()
    limit.take()
    with pytest.raises(TooManyRequests, match="2 requests are in flight"):
        limit.take()
    limit.give_back()
    limit.take()
    assert limit.in_flight == 2


def test_zero_is_no_limit(board: Board) -> None:
    """Requests are counted all the same."""
    for limit in (LocalLimit(0), SharedLimit(board, 0, 0)):
        for _ in range(1000):
            limit.take()
    assert board.in_flight(0) == 1000


def test_processes_share_one_limit(board: Board) -> None:
    """What one takes another one has not; what a dead one had comes back."""
    first, second = SharedLimit(board, 0, 2), SharedLimit(board, 1, 2)
    first.take()
    second.take()
    for limit in (first, second):
        with pytest.raises(TooManyRequests):
            limit.take()
    board.clear(0)
    second.take()
    with pytest.raises(TooManyRequests):
        first.take()


def test_the_limit_holds_while_processes_race(board: Board) -> None:
    """However they count at the same time."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(board.descriptor), str(row)],
            pass_fds=[board.descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for row in range(3)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    assert all(int(most) <= 2 for most, _ in told)
    assert sum(int(taken) for _, taken in told) > 0
    assert board.total_in_flight() == 0


def test_readiness_is_that_of_all(board: Board) -> None:
    """One process that is not ready is enough."""
    board.set_ready(0)
    board.set_ready(1)
    assert not board.all_ready()
    board.set_ready(2)
    assert board.all_ready()
    board.clear(1)
    assert not board.all_ready()
    board.set_ready(1)
    board.set_draining()
    assert not board.all_ready()


def test_a_closed_board_has_no_file() -> None:
    """Nothing is left open."""
    made = Board.create(1)
    made.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made.descriptor)
