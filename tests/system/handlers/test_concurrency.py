from __future__ import annotations

import subprocess
import sys

from ovmstrio.server.workers.board import Board

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


def test_a_shared_limit_holds_while_processes_race() -> None:
    board = Board.create(3)
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
        reported = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(int(most) <= 2 for most, _ in reported)
    assert sum(int(taken) for _, taken in reported) > 0
    assert board.total_in_flight() == 0
    board.close()
