"""Shared limits after user code has forked."""

from __future__ import annotations

import os
import subprocess
import sys

_FORKING = """
import os, signal
from ovmstrio.server.workers.bells import Bells

with Bells({secret!r}, 0).hung():
    begun, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"!")
        signal.pause()
    os.read(begun, 1)
try:
    with Bells({secret!r}, 0).hung():
        print("again")
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_what_code_of_users_has_forked_does_not_keep_the_bell() -> None:
    """It may outlive its process, whose successor could not be rung, and so not start."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKING.format(secret=os.urandom(8).hex())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("again\n", 0), ended.stderr
