"""Async generators in a worker process: pulled, left and closed from its threads, in any order."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent

_PROGRAM = """
import json, queue, sys, trio
from ovmstrio.work.isolation.generator_hosts import AsyncGeneratorHost
from ovmstrio.work.isolation.loop_thread import LoopThread

loop, answers, told = LoopThread(), queue.Queue(), []
alive = 0


async def generator():
    global alive
    alive += 1
    try:
        yield b"first"
        while True:
            await trio.sleep_forever()
            yield b"never"
    finally:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        alive -= 1


def host():
    return AsyncGeneratorHost(
        generator(), str, lambda *answer: answers.put(answer), None, loop=loop, ended=lambda: None
    )


def answer_of(number):
    while True:
        answered, value = answers.get(timeout=60)
        if answered == number:
            return value


for steps in sys.argv[1].split(","):
    made = host()
    for step in steps.split():
        match step:
            case "taken":
                made.pull(1)
                answer_of(1)
            case "pull":
                made.pull(2)
            case "answered":
                told.append(answer_of(2))
            case "leave":
                made.leave(2)
            case "close":
                made.close(3)
                told.append(answer_of(3))
print(json.dumps([alive, [each for each in told if each]]))
"""


def _told(steps: list[str]) -> tuple[int, list[object]]:
    """Give how many generators are alive at the end, and what pulls were answered and closing raised."""
    ran = subprocess.run(
        [sys.executable, "-c", dedent(_PROGRAM), ",".join(steps)], capture_output=True, check=True, timeout=60
    )
    alive, raised = json.loads(ran.stdout)
    return alive, raised


def test_closing_waits_for_the_end_of_the_step_that_is_cancelled() -> None:
    """However the loop orders the two, of which it says nothing."""
    assert _told(["taken pull leave close", "taken pull close"] * 50) == (0, [])


def test_a_generator_that_was_left_before_it_is_pulled_begins_no_step() -> None:
    """The request to pull and its cancellation are served by different threads, the second maybe first."""
    steps = ["leave pull answered close", "taken leave pull answered close"]
    assert _told(steps) == (0, [[[], None], [[], None]])
