"""Addresses of peers after user code has forked."""

from __future__ import annotations

import os
import subprocess
import sys

_FORKING = """
import os, signal, trio
from ovmstrio.server.workers.peers import Peers

async def echo(value):
    return value

async def main():
    first, second = (Peers({secret!r}, 2, row) for row in range(2))
    async with trio.open_nursery() as nursery:
        await nursery.start(first.run, echo)
        await nursery.start(second.run, echo)
        await first.ask(1, 1)
        begun, tell = os.pipe()
        child = os.fork()
        if not child:
            os.write(tell, b"!")
            signal.pause()
        os.read(begun, 1)
        nursery.cancel_scope.cancel()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(Peers({secret!r}, 2, 1).run, echo)
            print("again")
            nursery.cancel_scope.cancel()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

trio.run(main)
"""


def test_what_code_of_users_has_forked_does_not_keep_the_address() -> None:
    """It may outlive its process, whose successor needs the address."""
    program = _FORKING.format(secret=os.urandom(8).hex())
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("again\n", 0), ended.stderr
