from __future__ import annotations

import os
import subprocess
import sys

import pytest

_FORK = """
import os, signal, trio
from ovmstrio.workers.shared_state import WorkerWakeups
from ovmstrio.workers.rpc import WorkerRpc

def fork():
    begun, started = os.pipe()
    child = os.fork()
    if not child:
        os.write(started, b"!")
        signal.pause()
    os.read(begun, 1)
    return child

def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
_PEERS = """
async def echo(value):
    return value

async def main():
    first, second = (WorkerRpc({secret!r}, 2, row) for row in range(2))
    async with trio.open_nursery() as nursery:
        await nursery.start(first.run, echo)
        await nursery.start(second.run, echo)
        await first.call(1, 1)
        child = fork()
        nursery.cancel_scope.cancel()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(WorkerRpc({secret!r}, 2, 1).run, echo)
            print("again")
            nursery.cancel_scope.cancel()
    finally:
        end(child)

trio.run(main)
"""
_WAKEUPS = """
with WorkerWakeups({secret!r}, 0).open():
    child = fork()
try:
    with WorkerWakeups({secret!r}, 0).open():
        print("again")
finally:
    end(child)
"""


@pytest.mark.parametrize("program", [_PEERS, _WAKEUPS], ids=["address of a peer", "wake-up socket of a worker"])
def test_forked_child_of_user_code_does_not_keep_the_address_of_its_worker(program: str) -> None:
    code = _FORK + program.format(secret=os.urandom(8).hex())
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("again\n", 0), ended.stderr
