"""The limit of requests in flight, in one process and over many."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ovmstrio.core.errors import TooManyRequests
from ovmstrio.core.limits import LocalLimit
from ovmstrio.server.workers.board import Board, SharedLimit


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
